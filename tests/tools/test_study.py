"""Tests of the study harness: the checks of a design, and the statistics of its results."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import study

from megatron_brorl.errors import UserError

ARMS = ({"name": "few", "seconds": 10}, {"name": "many", "seconds": 10, "start": "few"})
COMPARISON = {"claim": "many is better", "before": "few", "after": "many"}


def design(**changes):
    settings = {"name": "d", "question": "?", "config": "run.toml", "seeds": (1, 2, 3), "arms": ARMS}
    return study.Design(**{**settings, "comparisons": (COMPARISON,), **changes})


def table(curves):
    """Return a table of results with ten rollouts per second; curves: {(arm, seed): ([seconds], [pass@1])}."""
    columns = ("phase", "run", "arm", "seed", "seconds", "rollouts", "pass_at_1")
    rows = [
        ("test", f"{arm}-{seed}", arm, seed, x, 10 * x, y)
        for (arm, seed), points in curves.items()
        for x, y in zip(*points, strict=True)
    ]
    return pd.DataFrame(rows, columns=columns)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": (*ARMS, ARMS[0])}, "two are named few"),
        ({"arms": ({"name": "few", "seconds": 1, "start": "later"},)}, "start = 'later'"),
        ({"arms": ({"name": "few"},)}, "has no budget"),
        ({"comparisons": ({**COMPARISON, "after": "none"},)}, "no arm is named none"),
        ({"tuning": {"seeds": (3,), "rates": (1e-3,)}}, "tuning.seeds"),
    ],
)
def test_inconsistent_designs_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        study.check(design(**changes), "d.toml")


def test_an_unknown_key_is_named_with_its_position(tmp_path):
    path = tmp_path / "d.toml"
    path.write_text('name = "d"\nquestion = "?"\nconfig = "run.toml"\nseeds = [1]\n[[arms]]\nname = "a"\nsecond = 3\n')
    with pytest.raises(UserError, match=r"d\.toml: arms\.0\.second: Extra inputs"):
        study.read_design(path)


def test_curves_are_compared_up_to_the_end_of_the_shorter_one():
    results = table({("few", 1): ([0, 10], [0.0, 0.5]), ("many", 1): ([0, 5, 20], [0.0, 0.4, 0.7])})
    comparison = study.Comparison(**COMPARISON)
    assert study.differences(comparison, results) == {1: pytest.approx(0.4 + 0.3 / 3 - 0.5)}  # interpolated at 10 s
    # Mean heights over 10 s: 0.25 for few, and (5 x 0.2 + 5 x 0.45) / 10 = 0.325 for many.
    mean = study.Comparison(**COMPARISON, end_point="mean", over="rollouts")
    assert study.differences(mean, results) == {1: pytest.approx(0.325 - 0.25)}


def test_times_until_a_target_are_censored_and_compared_by_sign():
    # "few" reaches 50% at 10, 20 and 40 (its end), and "many" at 5, 40 and 40: differences -5, 20 and 0 (a tie).
    x = [0, 5, 10, 20, 40]
    few = ([0, 0.1, 0.5, 0.6, 0.7], [0, 0.4, 0.4, 0.9, 0.2], [0, 0, 0, 0, 0.4])
    many = ([0, 0.5, 0.1, 0.1, 0.1], [0, 0, 0, 0, 0.4], [0, 0, 0, 0, 0])
    curves = {(arm, seed): (x, y) for arm, rows in (("few", few), ("many", many)) for seed, y in enumerate(rows)}
    until_reached = design(comparisons=({**COMPARISON, "end_point": "reached"},))
    row = study.infer(until_reached, table(curves)).iloc[0]
    assert row["by seed"] == {0: -5, 1: 20, 2: 0}
    assert (row.difference, row.p) == (0, 1)
    two_seeds = study.Comparison(**COMPARISON, end_point="reached", seeds=(0, 2))
    assert study.differences(two_seeds, table(curves)) == {0: -5, 2: 0}

    # Differences: -9, ..., -1 and 50, so p = 2 * (1 + 10) / 2**10. The median's interval is the 2nd to the 9th value.
    curves = {("few", seed): ([0, 100], [0, 1]) for seed in range(10)}
    curves |= {("many", seed): ([0, 100 - seed, 100] if seed else [0, 100, 200], [0, 1, 1]) for seed in range(10)}
    curves[("few", 0)] = ([0, 50, 100], [0, 1, 1])
    row = study.infer(until_reached, table(curves)).iloc[0]
    assert row.p == pytest.approx(22 / 1024)
    assert (row.difference, row.low, row.high) == (-4.5, -8, -1)


def test_inference_is_students_paired_test_over_runs():
    # Student's sleep data: mean 1.58, 95% interval 0.70 to 2.46, p = 0.00283.
    first = (0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0)
    second = (1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4)
    curves = {("few", seed): ([0, 1], [0.0, y]) for seed, y in enumerate(first)}
    curves |= {("many", seed): ([0, 1], [0.0, y]) for seed, y in enumerate(second)}
    row = study.infer(design(), table(curves)).iloc[0]
    assert (row.pairs, row.difference) == (10, pytest.approx(1.58))
    assert (row.low, row.high) == (pytest.approx(0.7001, abs=1e-4), pytest.approx(2.4599, abs=1e-4))
    assert row.p == row.holm == pytest.approx(0.002833, abs=1e-6)


def test_holm_covers_comparisons_that_have_no_pairs():
    rng = np.random.default_rng(0)
    curves = {(arm, seed): ([0, 1], [0.0, rng.normal()]) for arm in ("few", "many") for seed in range(5)}
    unknown = {**COMPARISON, "before": "many", "metric": "pass_at_8"}
    inferred = study.infer(design(comparisons=(COMPARISON, unknown)), table(curves).assign(pass_at_8=np.nan))
    assert inferred.p[1] == 1
    assert inferred.holm[0] == pytest.approx(min(1, 2 * inferred.p[0]))
