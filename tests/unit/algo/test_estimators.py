"""pass@k against enumeration, the bootstrap against the normal approximation and itself."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from megatron_brorl.algo.statistics import SHARE, Interval, bootstrap_mean, bootstrap_mean_of_means, pass_at_k


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_k_subsets_with_a_right_sample(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        right = [i < c for i in range(n)]
        subsets = [any(chosen) for chosen in itertools.combinations(right, k)]
        assert pass_at_k(n, c, k) == float(Fraction(sum(subsets), len(subsets)))


def test_pass_at_k_at_the_sizes_of_a_real_run() -> None:
    assert pass_at_k(512, 1, 1) == 1 / 512
    assert pass_at_k(512, 1, 256) == 0.5
    # As a product (the form in the paper's code), where floats are good enough to compare.
    product = 1 - math.prod(1 - 64 / i for i in range(512 - 3 + 1, 512 + 1))
    assert pass_at_k(512, 3, 64) == pytest.approx(product, rel=1e-12)
    assert pass_at_k(8192, 8191, 4096) == 1.0
    assert pass_at_k(10**6, 1, 1) == 1e-6  # 1 - (1 - 1e-6) would have lost ten digits


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5), (0, 0, 1)])
def test_pass_at_k_refuses_impossible_counts(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"must be in \["):
        pass_at_k(n, c, k)


def test_bootstrap_agrees_with_the_normal_approximation() -> None:
    x = np.random.default_rng(0).beta(2.0, 3.0, size=4000)
    got = bootstrap_mean(x.tolist(), resamples=4000, seed=1)
    half = 1.959964 * x.std() / math.sqrt(x.size)
    assert got.mean == x.mean()
    # The ends are quantiles of 4000 draws: their own standard error is 0.0422 * (2 * half / 3.92).
    assert got.low == pytest.approx(x.mean() - half, abs=0.1 * half)
    assert got.high == pytest.approx(x.mean() + half, abs=0.1 * half)


def test_bootstrap_of_two_prompts_is_the_binomial() -> None:
    # Means 0, 1/2, 1 with probability 1/4, 1/2, 1/4: the 2.5% and 97.5% quantiles are the extremes.
    assert bootstrap_mean([0.0, 1.0], resamples=500, seed=0) == Interval(0.5, 0.0, 1.0)


def test_the_mean_of_means_counts_groups_alike() -> None:
    """Its variance is that of a mean of independent means, by the normal approximation."""
    random = np.random.default_rng(2)
    groups = [random.beta(2.0, 3.0, size=2000), random.beta(5.0, 1.0, size=500)]
    got = bootstrap_mean_of_means([x.tolist() for x in groups], resamples=4000, seed=1)
    mean = (groups[0].mean() + groups[1].mean()) / 2
    half = 1.959964 * math.sqrt(sum(x.var() / x.size for x in groups)) / 2
    assert got.mean == pytest.approx(mean, rel=1e-12)
    assert got.low == pytest.approx(mean - half, abs=0.1 * half)
    assert got.high == pytest.approx(mean + half, abs=0.1 * half)
    # Two benchmarks of one prompt each leave nothing to resample.
    assert bootstrap_mean_of_means([[0.0], [1.0]], resamples=10, seed=0) == Interval(0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="at least one group"):
        bootstrap_mean_of_means([], resamples=10, seed=0)


def test_bootstrap_depends_on_its_arguments_only() -> None:
    values = np.random.default_rng(1).random(50).tolist()
    first = bootstrap_mean(values, resamples=200, seed=7)
    np.random.seed(123)
    np.random.random(10)
    assert bootstrap_mean(values, resamples=200, seed=7) == first
    assert bootstrap_mean(values, resamples=200, seed=8) != first
    assert bootstrap_mean(values, resamples=200, seed=-1).low < first.mean  # any integer is a seed


def test_bootstrap_of_equal_values_has_no_width() -> None:
    assert bootstrap_mean([0.25], resamples=10, seed=0).as_dict() == {"mean": 0.25, "low": 0.25, "high": 0.25}
    assert bootstrap_mean([0.5] * 9, resamples=10, seed=0) == Interval(0.5, 0.5, 0.5)


@pytest.mark.parametrize("n", [1, 2, 5, 40, 320, 10_000])
def test_equal_shares_have_the_interval_of_clopper_and_pearson(n: int) -> None:
    """None of n right, or all: the share at which that has a probability of 0.025 (Clopper and Pearson 1934)."""
    none, every = (bootstrap_mean([v] * n, resamples=10, seed=0, bounds=SHARE) for v in (0.0, 1.0))
    assert (none.mean, none.low, every.mean, every.high) == (0.0, 0.0, 1.0, 1.0)
    assert (1 - none.high) ** n == pytest.approx(0.025)
    assert every.low**n == pytest.approx(0.025)


@pytest.mark.parametrize(
    ("n", "value", "bounds"), [(3, 0.25, (0, 1)), (1, 0.375, (0, 1)), (7, 0.0, (-1, 1)), (4, -0.5, (-1, 1))]
)
def test_equal_values_leave_room_for_what_was_not_drawn(n: int, value: float, bounds: tuple[float, float]) -> None:
    """The ends are means of the extreme prompts that show nothing but one value n times with probability 0.025."""
    got = bootstrap_mean([value] * n, resamples=10, seed=0, bounds=bounds)
    seen = 0.025 ** (1 / n)  # the share of prompts with the value
    assert got.mean == value
    assert got.low == pytest.approx(seen * value + (1 - seen) * bounds[0])
    assert got.high == pytest.approx(seen * value + (1 - seen) * bounds[1])


def test_bounds_change_nothing_where_values_differ() -> None:
    values = [0.0] * 30 + [1.0]
    assert bootstrap_mean(values, 200, 1, SHARE) == bootstrap_mean(values, 200, 1)
    # A benchmark of equal values widens the mean by its own share.
    plain, wide = (bootstrap_mean_of_means([values, [0.0] * 8], 200, 1, b) for b in (None, SHARE))
    assert (wide.mean, wide.low) == (plain.mean, plain.low)
    assert wide.high - plain.high == pytest.approx((1 - 0.025 ** (1 / 8)) / 2)


@pytest.mark.parametrize(
    ("values", "resamples", "message"),
    [([], 10, "at least one prompt"), ([0.5], 0, "at least 1"), ([0.5, float("nan")], 10, "finite")],
)
def test_bootstrap_refuses_what_has_no_interval(values: list[float], resamples: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bootstrap_mean(values, resamples, seed=0)
