"""Student's tail against closed forms and numerical integration; the paired test against sums written out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_brorl.algo.paired import paired, student_tail
from megatron_brorl.algo.statistics import bootstrap_mean


@pytest.mark.parametrize("t", [-30.0, -1.5, 0.0, 0.3, 1.0, 4.0, 50.0])
def test_tails_with_closed_forms(t):
    """One and two degrees of freedom."""
    assert student_tail(t, 1) == pytest.approx(0.5 - math.atan(t) / math.pi, rel=1e-12, abs=1e-16)
    assert student_tail(t, 2) == pytest.approx(0.5 - t / (2 * math.sqrt(2 + t * t)), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(("t", "degrees"), [(0.7, 3), (2.0, 9), (-1.0, 17), (3.5, 40), (4.84, 10_000), (1.0, 200_000)])
def test_tails_by_integration(t, degrees):
    """Simpson's rule over the density from t to where nothing is left."""
    log_front = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
    # x = t + s / (1 - s) takes [0, 1) to all that is beyond t.
    s = np.linspace(0, 1, 400_001)[:-1]
    x = t + s / (1 - s)
    density = np.exp(log_front - (degrees + 1) / 2 * np.log1p(x * x / degrees)) / (1 - s) ** 2
    density = np.append(density, 0.0)  # at infinity
    weights = np.ones(len(density))
    weights[1:-1:2], weights[2:-1:2] = 4, 2
    assert student_tail(t, degrees) == pytest.approx(float((weights * density).sum() / 400_000 / 3), rel=1e-8)


def test_the_p_value_of_the_paper():
    """t = 4.84 over more than 10,000 prompts: one-tailed p = 6.5e-7 (BroRL, section 4.2.2)."""
    assert student_tail(4.84, 10_000) == pytest.approx(6.5e-7, rel=0.02)


def test_paired_test_written_out():
    before, after = [0.25, 0.5, 1.0, 0.0, 0.75], [0.5, 0.5, 1.0, 0.25, 0.5]
    d = [b - a for a, b in zip(before, after, strict=True)]
    mean = math.fsum(d) / 5
    error = math.sqrt(math.fsum((x - mean) ** 2 for x in d) / 4 / 5)
    found = paired(before, after, 500, 7)
    assert found.t == pytest.approx(mean / error, rel=1e-12)
    assert found.degrees == 4
    assert found.two_tailed == pytest.approx(2 * found.one_tailed)
    assert found.difference == bootstrap_mean(d, 500, 7)
    swapped = paired(after, before, 500, 7)
    assert (swapped.t, swapped.two_tailed) == (-found.t, found.two_tailed)
    assert swapped.one_tailed == pytest.approx(1 - found.one_tailed)


def test_differences_that_do_not_vary():
    same = paired([0.5, 0.25], [0.5, 0.25], 10, 0)
    assert (same.t, same.one_tailed, same.two_tailed) == (0.0, 0.5, 1.0)
    better = paired([0.5, 0.25], [0.75, 0.5], 10, 0)
    assert (better.t, better.one_tailed, better.two_tailed) == (math.inf, 0.0, 0.0)
    worse = paired([0.5, 0.25], [0.25, 0.0], 10, 0)
    assert (worse.t, worse.one_tailed, worse.two_tailed) == (-math.inf, 1.0, 0.0)
    with pytest.raises(ValueError, match="1 and 1 values"):
        paired([0.5], [0.5], 10, 0)


def test_the_test_has_its_size():
    """Where nothing differs, one in twenty of 2,000 tests is below 0.05, within four standard errors."""
    g = np.random.default_rng(0)
    hits = 0
    for _ in range(2000):
        d = g.normal(size=12)
        hits += paired([0.0] * 12, d.tolist(), 1, 0).two_tailed < 0.05
    assert abs(hits / 2000 - 0.05) < 4 * math.sqrt(0.05 * 0.95 / 2000)
