"""The page says what the table holds."""

from __future__ import annotations

import pytest
from made_study import made, run_rows
from study import figures, page
from study.design import sha256
from study.end_points import Results

from megatron_brorl.errors import UserError


@pytest.fixture
def study(tmp_path):
    design, rows = made(tmp_path), []
    for arm, lr, right in (("n8", 5e-4, 4), ("n8", 1e-3, 2), ("n64", 1e-3, 2), ("n64", 2e-3, 8)):
        rows += run_rows(design, "tune", arm, "easy", 9, [(0, 0, [0]), (10, 100, [right])], lr=lr)
    for seed in (1, 2, 3):
        for prompt_set in ("trained", "unseen", "support"):
            for of in ("hard", "easy"):
                arms = {"n8": [2, 0], "n64": [4, seed], **({"n8wide": [1, 1]} if of == "hard" else {})}
                for arm, right in arms.items():
                    points = [(0, 0, [1, 1]), (10, 160, right)]
                    rows += run_rows(design, "test", arm, of, seed, points, prompt_set=prompt_set)
    return design, rows


def test_the_page(study, tmp_path):
    design, rows = study
    path = page.write(design, rows, tmp_path, "made.toml runs")
    text = path.read_text()
    assert f"`{sha256(design)}`" in text
    assert "| n64 is ahead | an interval below 0 |" in text
    assert "python tools/run_study.py made.toml runs" in text

    # Rates: half of the end, for curves are straight lines from 0; the chosen one in bold, and whether it is an edge.
    assert "| n8 | **25.0% (0.0005)** | 12.5% (0.001) | yes |" in text
    assert "| n64 | 12.5% (0.001) | **50.0% (0.002)** | yes |" in text

    # n64 - n8 at the end is (4 + seed - 2) / 16 on both bins: 3, 4 and 5 sixteenths; their standard error 1/16/sqrt 3.
    assert (
        "| n64 - n8: final pass@1 over seconds, trained, hard+easy | +25.0% (+9.5% to +40.5%) | 6.93 | 2 | 0.02 | "
        "**0.04** | +18.8%, +25.0%, +31.2% |"
    ) in text
    # n64 has from the start on what n8 ends with, 2 of 16, and ends above it.
    assert "| n64 holds what n8 ends with | hard | 0.0 (10.0) | 0.0 (10.0) | 0.0 (10.0) |" in text
    assert "| n8 holds what n64 ends with | easy | never (10.0) | never (10.0) | never (10.0) |" in text
    # One of the first prompt's and none of the second's right answers are left with n8: lost 1.
    assert text.count("| hard | n8 | ") == 1 + 3
    assert "| hard | n8 | 2 | 2 | 1 | 1 | 0 |" in text
    for name in ("curves_trained.png", "curves_unseen.png", "differences.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert f"({name})" in text


def test_a_comparison_without_its_runs_counts_in_the_family(study):
    design, rows = study
    left = [row for row in rows if row["arm"] != "n8wide"]
    tests = page.tested(design, Results(left))
    assert tests[1][2] is None
    assert "no test run of arm n8wide" in tests[1][3]
    assert page.adjusted(tests)[0] == pytest.approx(2 * tests[0][2].p)


def test_one_warm_start_has_no_interval(study):
    design, rows = study
    object.__setattr__(design.warm_starts, "test", (1,))
    tests = page.tested(design, Results(rows))
    assert [why for *_, why in tests] == ["one warm start has no interval"] * 2
    assert list(tests[0][1].values()) == [3 / 16]


def test_curves_have_a_line_per_run_and_a_mean(study):
    design, rows = study
    drawn = figures.curves(design, Results(rows), "trained")
    hard_seconds, hard_rollouts, easy_seconds, _ = drawn.axes
    assert [len(axes.lines) for axes in drawn.axes] == [3 * 4, 3 * 4, 2 * 4, 2 * 4]
    runs, mean = hard_seconds.lines[4:7], hard_seconds.lines[7]
    assert [list(line.get_ydata()) for line in runs] == [[1 / 8, (4 + seed) / 16] for seed in (1, 2, 3)]
    assert (mean.get_ydata()[0], mean.get_ydata()[-1]) == pytest.approx((1 / 8, 6 / 16))
    assert mean.get_xdata()[-1] == 10
    assert hard_rollouts.lines[0].get_xdata()[-1] == pytest.approx(0.16)
    assert easy_seconds.get_title(loc="left") == "easy prompts, trained"


def test_a_mean_goes_as_far_as_the_shortest_run():
    lines = [[(0.0, 0.0), (4.0, 0.4)], [(0.0, 0.2), (2.0, 0.6), (8.0, 0.6)]]
    mean = figures.mean_curve(lines)
    assert mean[0] == (0.0, pytest.approx(0.1))
    assert mean[-1] == (4.0, pytest.approx(0.5))


def test_where_the_rates_are_not_known_yet(study, tmp_path):
    design, rows = study
    tune = [row for row in rows if row["phase"] == "tune" and row["arm"] == "n8"]
    text = page.write(design, tune, tmp_path, "x").read_text()
    assert "| n8 | 25.0% (0.0005) | 12.5% (0.001) |  |" in text
    assert "## Differences" not in text
    with pytest.raises(UserError, match="arm n64"):
        page.chosen_rates(design, Results(tune))
