"""End points against integrals by hand, and what is paired with what."""

from __future__ import annotations

import pytest
from made_study import made, run_rows
from study.design import Comparison
from study.end_points import (
    Place,
    Results,
    area,
    chosen_rates,
    curve,
    differences,
    final_shares,
    height,
    seconds_to_end,
    support,
    tuning_table,
)
from study.plateau import gain, next_part, on_from, reached

from megatron_brorl.errors import UserError

BENT = [(0.0, 0.0), (2.0, 0.5), (4.0, 0.5), (10.0, 0.8)]


def test_areas_by_hand():
    assert area(BENT, 2.0) == pytest.approx(0.25)
    assert area(BENT, 4.0) == pytest.approx((0.5 + 1.0) / 4)
    assert area(BENT, 7.0) == pytest.approx((0.5 + 1.0 + 3 * (0.5 + 0.65) / 2) / 7)  # 0.65 half-way to 0.8
    assert area(BENT, 10.0) == pytest.approx((0.5 + 1.0 + 6 * 0.65) / 10)
    assert area([(1.0, 0.25), (3.0, 0.25)], 2.5) == pytest.approx(0.25)  # a start that is not 0


def test_a_parabola_in_small_steps_has_its_integral():
    points = [(x / 1000, (x / 1000) ** 2) for x in range(2001)]
    assert area(points, 2.0) == pytest.approx((8 / 3) / 2, abs=1e-6)


def test_heights():
    assert [height(BENT, x) for x in (0.0, 1.0, 2.0, 3.0, 7.0, 10.0)] == pytest.approx([0, 0.25, 0.5, 0.5, 0.65, 0.8])
    for outside in (-0.1, 10.1):
        with pytest.raises(ValueError, match="must be within"):
            height(BENT, outside)


def test_points_without_the_figure_are_left_out(tmp_path):
    rows = run_rows(made(tmp_path), "test", "n8", "hard", 1, [(0, 0, [0]), (1, 8, [2]), (3, 32, [4])])
    rows[1]["pass_at_k"] = None
    assert curve(rows, "rollouts", "pass_at_k") == [(0, 0), (32, 1)]
    assert curve(rows, "tokens") == [(0, 0), (40, 0.25), (160, 0.5)]


def study(tmp_path):
    """n64 is slower by rollout and faster by second on hard prompts; warm start s adds s right answers to it."""
    design, rows = made(tmp_path), []
    for seed in (1, 2, 3):
        rows += run_rows(design, "test", "n8", "hard", seed, [(0, 0, [0, 0]), (10, 100, [2, 2])])
        rows += run_rows(
            design, "test", "n64", "hard", seed, [(0, 0, [0, 0]), (5, 400, [seed, seed]), (12, 800, [8, 8])]
        )
        rows += run_rows(design, "test", "n8wide", "hard", seed, [(0, 0, [0, 0]), (11, 200, [4, 4])])
        rows += run_rows(design, "test", "n8", "easy", seed, [(0, 0, [4, 4]), (10, 100, [4, 4])])
        rows += run_rows(design, "test", "n64", "easy", seed, [(0, 0, [4, 4]), (10, 900, [4, 8])])
    return design, rows


def test_differences_are_read_where_the_shorter_run_ends(tmp_path):
    design, rows = study(tmp_path)
    final, areas = design.comparisons
    # At 10 s: n64 is 5 / 7 of the way from seed / 8 to 1; on easy prompts 0.75 against 0.5; the mean of both bins.
    at_ten = {seed: seed / 8 + (1 - seed / 8) * 5 / 7 for seed in (1, 2, 3)}
    expected = {seed: ((height - 0.25) + 0.25) / 2 for seed, height in at_ten.items()}
    assert differences(design, final, Results(rows)) == pytest.approx(expected)
    # At 200 rollouts both are straight lines from 0: half of seed / 8 and of 1 / 2 high, the mean half of that.
    assert differences(design, areas, Results(rows)) == pytest.approx({s: s / 32 - 1 / 4 for s in (1, 2, 3)})


def test_seconds_until_a_run_has_what_another_ends_with(tmp_path):
    """n8 ends at 1/4 after 10 s. n64 is at seed / 8 after 5 s and at 1 after 12, which n8 never is."""
    _, rows = study(tmp_path)
    hard = {arm: [Place("test", arm, "hard", seed) for seed in (1, 2, 3)] for arm in ("n8", "n64")}
    found = [seconds_to_end(Results(rows), one, other) for one, other in zip(hard["n64"], hard["n8"], strict=True)]
    # Seed 1: 1/8 of the 7/8 between 5 and 12 s; seed 2: at 5 s; seed 3: two thirds of the way to 3/8.
    assert found == [(pytest.approx(5 + 7 / 7), 10), (5, 10), (pytest.approx(10 / 3), 10)]
    assert seconds_to_end(Results(rows), hard["n8"][0], hard["n64"][0]) == (None, 12)
    easy = [Place("test", arm, "easy", 1) for arm in ("n64", "n8")]
    assert seconds_to_end(Results(rows), *easy) == (0, 10)  # from the start on


def test_a_run_that_is_missing_or_failed_is_named(tmp_path):
    design, rows = study(tmp_path)
    left = [row for row in rows if (row["arm"], row["warm_start"]) != ("n64", 2)]
    with pytest.raises(UserError, match="no test run of arm n64 on hard prompts of warm start 2"):
        differences(design, design.comparisons[0], Results(left))
    for row in rows:
        row["error"] = "diverged" if row["arm"] == "n64" else ""
    with pytest.raises(UserError, match="ended early: diverged"):
        differences(design, design.comparisons[0], Results(rows))


def test_rates_by_area(tmp_path):
    design, rows = made(tmp_path), []
    for arm, lr, right in (("n8", 5e-4, 4), ("n8", 1e-3, 4), ("n64", 1e-3, 2), ("n64", 2e-3, 8)):
        rows += run_rows(design, "tune", arm, "easy", 9, [(0, 0, [0]), (10, 100, [right])], lr=lr)
    assert tuning_table(design, Results(rows))["n64"] == pytest.approx({1e-3: 1 / 8, 2e-3: 1 / 2})
    assert chosen_rates(design, Results(rows)) == {"n8": 5e-4, "n64": 2e-3}  # the lower of equals
    rows[-1]["error"] = rows[-2]["error"] = "diverged"
    assert chosen_rates(design, Results(rows))["n64"] == 1e-3
    for row in rows:
        row["error"] = "diverged"
    with pytest.raises(UserError, match="arm n8: no run of its tuning"):
        chosen_rates(design, Results(rows))


def test_support_counts_prompts(tmp_path):
    design = made(tmp_path)
    rows = run_rows(design, "test", "n8", "hard", 1, [(0, 0, [1, 0, 0, 3]), (9, 9, [0, 0, 2, 8])], prompt_set="support")
    found = support(Results(rows), rows[0]["run"])
    assert (found.samples, found.before, found.after, found.lost, found.gained) == (8, 2, 2, 1, 1)
    assert support(Results([]), "none") is None


def test_final_shares_are_of_the_last_point(tmp_path):
    _, rows = study(tmp_path)
    found = final_shares(Results(rows), "hard", "trained")
    assert len(found) == 3 * 3 * 2
    assert {"share": 0.25, "arm": "n8", "warm_start": 2, "prompt": "p2.1"} in found


def part(design, number, lr, before, after):
    return run_rows(design, "plateau", "n8", "easy", 1, [(0, 0, [before]), (10, 100, [after])], lr=lr, part=number)


def test_the_way_to_a_plateau(tmp_path):
    """A gain of an eighth goes on; none cuts the rate; none at a cut rate is the plateau."""
    design, rates = made(tmp_path), {"n8": 1e-3, "n64": 2e-3}
    rows = []

    def following():
        return next_part(design, rates, Results(rows), 1, "easy")

    assert (following().lr, following().part, following().after) == (1e-3, 1, "")
    rows += part(design, 1, 1e-3, 2, 3)
    assert (following().lr, following().part, following().after) == (1e-3, 2, rows[-1]["run"])
    assert gain(Results(rows), rows[-1]["run"]) == 0.125
    rows += part(design, 2, 1e-3, 3, 3)
    assert (following().lr, following().part) == (5e-4, 3)
    assert not reached(design.plateau[0], Results(rows), 1, "easy")
    rows += part(design, 3, 5e-4, 3, 3)
    assert following() is None
    assert reached(design.plateau[0], Results(rows), 1, "easy")

    # From there on: the last rate, by the square root of the rollouts of a step, 64 x 2 against 8 x 2.
    on = {run.arm: run for run in on_from(design, Results(rows), 1, "easy")}
    assert (on["n8"].lr, on["n64"].lr) == pytest.approx((5e-4, 5e-4 * 8**0.5))
    assert {run.after for run in on.values()} == {rows[-1]["run"]}


def test_no_more_continuations_than_allowed(tmp_path):
    design, rows = made(tmp_path), []
    for number in range(1, 5):
        rows += part(design, number, 1e-3, number, number + 1)
    assert next_part(design, {"n8": 1e-3}, Results(rows), 1, "easy") is None
    assert not reached(design.plateau[0], Results(rows), 1, "easy")


def test_a_comparison_from_the_plateau(tmp_path):
    design, rows = made(tmp_path), []
    rows += run_rows(design, "plateau", "n8", "easy", 1, [(0, 0, [4]), (10, 100, [4])])
    rows += part(design, 1, 1e-3, 0, 8)  # on the way: no part of the comparison
    rows += run_rows(design, "plateau", "n64", "easy", 1, [(0, 0, [4]), (10, 100, [6])])
    c = Comparison("n8", "n64", "final", "seconds", "trained", ("easy",), phase="plateau")
    assert differences(design, c, Results(rows)) == {1: 0.25}
