"""The map of a design: which arm is best where, and what a choice loses, against a count by hand."""

from __future__ import annotations

import itertools

import pytest
from made_study import TOML, made, run_rows
from study import best_n, map_page, order, results
from study.design import canonical, sha256
from study.end_points import Results

from megatron_brorl.errors import UserError

MAP = '[[maps]]\narms = ["n8", "n64"]\nat = [0.5, 1.0]\npilot = "n8"\nsteps = 3\n[config.data]'
ENDS = {  # right of 8 samples of two prompts at the end, by bin, arm and warm start
    ("hard", "n8"): {1: 2, 2: 4, 3: 6},
    ("hard", "n64"): {1: 8, 2: 2, 3: 8},
    ("easy", "n8"): {1: 16, 2: 12, 3: 10},
    ("easy", "n64"): {1: 8, 2: 13, 3: 9},
}
ADVICE = {("hard", 1): 60, ("hard", 2): 9, ("hard", 3): 600, ("easy", 1): 23, ("easy", 2): 22, ("easy", 3): 2}


@pytest.fixture
def study(tmp_path):
    design, rows = made(tmp_path, TOML.replace("[config.data]", MAP)), []
    for (of, arm), ends in ENDS.items():
        for seed, right in ends.items():
            # From 0 to the end in a straight line, past the budget of 10 s.
            points = [(0, 0, [0, 0]), (20, 100, [right, right])]
            rows += run_rows(design, "test", arm, of, seed, [(x, y, [min(r, 8) for r in z]) for x, y, z in points])
            rows[-1]["pass_at_1"] = right / 8
    for (of, seed), n in ADVICE.items():
        (row,) = run_rows(design, "pilot", "n8", of, seed, [(0, 0, [0])], prompt_set="advice")
        rows.append(row | {"advised_n": n, "advised_low": 2, "advised_high": 900, "advised_prompts": 5})
    return design, rows


def test_the_hash_of_designs_without_a_map_is_what_it_was(tmp_path):
    assert '"maps"' not in canonical(made(tmp_path))
    assert sha256(made(tmp_path)) == "56c01fa5ec6f8d60a98c90bbaccfad30566ccf9ae15667e0ee746496cdda2efc"


def test_cells_are_read_at_shares_of_the_budget(study):
    design, rows = study
    found = best_n.cells(design, Results(rows))
    assert [(c.bin, c.share) for c in found] == [("hard", 0.5), ("hard", 1.0), ("easy", 0.5), ("easy", 1.0)]
    for cell in found:  # 10 s are half of a curve of 20 s
        for arm, by_seed in cell.scores.items():
            want = {seed: cell.share / 2 * right / 8 for seed, right in ENDS[cell.bin, arm].items()}
            assert by_seed == pytest.approx(want)


def test_regret_is_against_the_best_of_the_other_warm_starts(study):
    design, rows = study
    hard = best_n.cells(design, Results(rows))[1]
    for choice in itertools.product(("n8", "n64"), repeat=3):
        choices = dict(zip((1, 2, 3), choice, strict=True))
        by_hand = []
        for seed in (1, 2, 3):
            others = {arm: sum(x for s, x in ENDS["hard", arm].items() if s != seed) for arm in ("n8", "n64")}
            best = "n8" if others["n8"] >= others["n64"] else "n64"
            by_hand.append((ENDS["hard", best][seed] - ENDS["hard", choices[seed]][seed]) / 16)
        assert hard.regret(choices) == pytest.approx(by_hand)
    # n64 leads without warm start 2 (16 to 8), where it is behind: always n8 is ahead of that choice there.
    assert hard.regret({2: "n8"}) == [pytest.approx(-2 / 16)]


def test_the_advisor_counts_as_the_nearest_arm(study):
    design, rows = study
    assert [best_n.nearest(design, n) for n in (2, 22, 23, 600)] == ["n8", "n8", "n64", "n64"]
    found = best_n.policies(design, Results(rows))
    assert list(found) == ["the advisor", "always n8", "always n64"]
    assert found["the advisor"] == {at: "n8" if n < 22.6 else "n64" for at, n in ADVICE.items()}
    # Where it has no answer for one place it has no regret.
    unknown = [row | {"advised_n": None} if row["warm_start"] == 2 else row for row in rows]
    assert list(best_n.policies(design, Results(unknown))) == ["always n8", "always n64"]


def test_the_page_has_cells_answers_and_regrets(study):
    design, rows = study
    text = map_page.section(design, Results(rows))
    # (2 + 4 + 6) / 3 and (8 + 2 + 8) / 3 of 16 at 10 s.
    assert "| hard | 10 | 25.0% | 37.5% | n64 (n64, n8, n64) |" in text
    assert "| hard | 3 | 600 (2 to 900) | 5 | n64 |" in text
    assert "| easy | 2 | 22 (2 to 900) | 5 | n8 |" in text
    row = next(line for line in text.splitlines() if line.startswith("| always n64 |"))
    # hard at 10 s: the best of the others is n64, n8 (8 against 10 without warm start 2: n64) ...
    cells = best_n.cells(design, Results(rows))
    choices = best_n.policies(design, Results(rows))["always n64"]
    means = [sum(best_n.regrets(c, choices)) / 3 for c in cells]
    assert row == f"| always n64 | {' | '.join(f'{x:+.1%}' for x in [*means, sum(means) / 4, max(means)])} |"


def test_a_run_that_is_missing_is_named(study):
    design, rows = study
    left = [row for row in rows if (row["arm"], row["bin"]) != ("n64", "easy")]
    assert "no test run of arm n64 on easy prompts of warm start 1" in map_page.section(design, Results(left))


def test_pilots_are_of_every_warm_start_and_bin(study, tmp_path):
    design, rows = study
    found = order.pilots(design, {"n8": 1e-3, "n64": 2e-3})
    assert {(run.bin, run.warm_start) for run in found} == {(of, s) for of in ("hard", "easy") for s in (1, 2, 3)}
    assert {(run.phase, run.arm, run.lr) for run in found} == {("pilot", "n8", 1e-3)}
    # The table keeps what they say, and null of what is no pilot.
    results.write_run(tmp_path, "x", rows[-1:] + rows[:1])
    (pilot, other) = results.read_all(tmp_path, sha256(design))
    assert (pilot["advised_n"], pilot["advised_high"], other["advised_n"]) == (2, 900, None)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('arms = ["n8", "n64"]\nat', 'arms = ["n8"]\nat', "two arms at least"),
        ('arms = ["n8", "n64"]\nat', 'arms = ["n8", "n8wide"]\nat', "each tested on all bins"),
        ("at = [0.5, 1.0]", "at = [0.0]", "above 0"),
        ('pilot = "n8"', 'pilot = "n9"', "'n9' is none of"),
        ("steps = 3", "steps = 0", "at least 1"),
    ],
)
def test_a_faulty_map_is_refused(tmp_path, before, after, message):
    text = TOML.replace("[config.data]", MAP)
    assert before in text
    with pytest.raises(UserError, match=message):
        made(tmp_path, text.replace(before, after))
