"""The short version of the table of estimators: what is called unbiased is, and intervals hold what they should."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import estimator_table

BIASED = ("hold_out/s_r", "hold_out/sampled", "hold_out/unsampled")  # products of estimates, plugged in


@pytest.fixture(scope="module")
def lines():
    return estimator_table.table(repetitions=150, seed=0)


def test_unbiased_but_for_what_is_plugged_in(lines):
    """Within four standard errors; where all repetitions agree there is no error to tell it by."""
    checked = [x for x in lines if x.name not in BIASED and x.bias_se > 1e-9 * x.truth]
    for x in checked:
        assert abs(x.bias) <= 4 * x.bias_se, x
    assert len(checked) > 80


def test_intervals_hold_the_truth(lines):
    """At least 90% of every distribution, at N = 16 as at 64; none is unknown, none a certainty."""
    told = [x for x in lines if x.coverage is not None]
    for x in told:
        assert x.coverage >= 0.9, x
        assert x.unknown == 0, x
        assert x.width > 0, x
    assert len(told) == 2 * 4 * 7 + 2


@pytest.mark.parametrize("n", [16, 64])
@pytest.mark.parametrize("case", estimator_table.distributions(), ids=lambda case: case.name)
def test_the_mass_that_a_group_has_not_seen(case, n):
    """Good-Turing's interval more closely: 95% but for what 1,000 repetitions may be off by."""
    found = next(estimator_table.of_unseen(case, n, 1000, np.random.default_rng(n)))
    assert found.coverage > 0.95 - 3 * np.sqrt(0.95 * 0.05 / 1000)
    assert found.width < 0.95


def test_a_plugged_in_square_would_show():
    """The estimate that the token's was before: siblings' means squared read a gain where there is none."""
    rng = np.random.default_rng(0)
    p = np.full(50, 1 / 50)
    found = []
    for _ in range(200):
        token, reward = rng.choice(50, size=64, p=p), rng.random(64) < 0.5
        count = np.bincount(token, minlength=50)
        better = np.bincount(token, reward, 50) / np.maximum(count, 1) - reward.mean()
        found.append(float(count @ (p * better**2)) / 64)
    assert min(found) > 0
    lines = list(estimator_table.of_tokens("alike", np.full(50, 0.5), 64, 200, rng))
    assert abs(lines[0].bias) < np.mean(found) / 4
