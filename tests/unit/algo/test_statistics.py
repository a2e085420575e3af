"""Bootstrap intervals against the normal approximation and closed forms; Student's test against closed forms."""

import math

import numpy as np
import pytest

from megatron_brorl.algo.statistics import (
    SHARE,
    Interval,
    bootstrap_mean,
    bootstrap_mean_of_means,
    paired,
    student_tail,
)


def test_bootstrap_of_two_and_of_equal_values():
    # Means 0, 1/2, 1 with probability 1/4, 1/2, 1/4: the 2.5% and 97.5% quantiles are the extremes.
    assert bootstrap_mean([0.0, 1.0], resamples=500, seed=0) == Interval(0.5, 0.0, 1.0)
    assert bootstrap_mean([0.5] * 9, resamples=10, seed=0).as_dict() == {"mean": 0.5, "low": 0.5, "high": 0.5}


def test_the_mean_of_means_gives_groups_equal_weight():
    """The interval is that of the normal approximation for a mean of independent means."""
    random = np.random.default_rng(2)
    groups = [random.beta(2.0, 3.0, size=2000), random.beta(5.0, 1.0, size=500)]
    interval = bootstrap_mean_of_means([x.tolist() for x in groups], resamples=4000, seed=1)
    mean = (groups[0].mean() + groups[1].mean()) / 2
    half_width = 1.959964 * math.sqrt(sum(x.var() / x.size for x in groups)) / 2
    assert interval.mean == pytest.approx(mean, rel=1e-12)
    # The ends are quantiles of 4000 draws, whose standard error is 0.0422 standard deviations, 0.022 half widths.
    assert (interval.low, interval.high) == pytest.approx((mean - half_width, mean + half_width), abs=0.1 * half_width)
    # Two benchmarks of one prompt each leave nothing to resample.
    assert bootstrap_mean_of_means([[0.0], [1.0]], resamples=10, seed=0) == Interval(0.5, 0.5, 0.5)


def test_bootstrap_depends_on_its_arguments_only():
    values = np.random.default_rng(1).random(50).tolist()
    first = bootstrap_mean(values, resamples=200, seed=7)
    np.random.seed(123)
    np.random.random(10)
    assert bootstrap_mean(values, resamples=200, seed=7) == first
    assert bootstrap_mean(values, resamples=200, seed=8) != first
    assert bootstrap_mean(values, resamples=200, seed=-1).low < first.mean  # any integer is a seed


@pytest.mark.parametrize("n", [1, 2, 5, 40, 320, 10_000])
def test_equal_shares_have_the_interval_of_clopper_and_pearson(n):
    """The end is the share at which 0 of n, or n of n, has a probability of 0.025 (Clopper and Pearson 1934)."""
    none, every = (bootstrap_mean([v] * n, resamples=10, seed=0, bounds=SHARE) for v in (0.0, 1.0))
    assert (none.mean, none.low, every.mean, every.high) == (0.0, 0.0, 1.0, 1.0)
    assert (1 - none.high) ** n == pytest.approx(0.025)
    assert every.low**n == pytest.approx(0.025)


@pytest.mark.parametrize(
    ("n", "value", "bounds"), [(3, 0.25, (0, 1)), (1, 0.375, (0, 1)), (7, 0.0, (-1, 1)), (4, -0.5, (-1, 1))]
)
def test_the_interval_of_equal_values_allows_for_unseen_values(n, value, bounds):
    """At each end, a share of 0.025^(1/n) of all prompts has the value. Then n of n have it with probability 0.025."""
    interval = bootstrap_mean([value] * n, resamples=10, seed=0, bounds=bounds)
    share = 0.025 ** (1 / n)  # the share of prompts with the value
    ends = [share * value + (1 - share) * bound for bound in bounds]
    assert (interval.mean, interval.low, interval.high) == pytest.approx((value, *ends))


def test_bounds_change_nothing_if_values_differ():
    values = [0.0] * 30 + [1.0]
    settings = {"resamples": 200, "seed": 1}
    assert bootstrap_mean(values, **settings, bounds=SHARE) == bootstrap_mean(values, **settings)
    # The second benchmark has 8 equal values. Half of its upper end, 1 - 0.025^(1/8), widens the mean of both.
    plain, bounded = (bootstrap_mean_of_means([values, [0.0] * 8], **settings, bounds=b) for b in (None, SHARE))
    assert (bounded.mean, bounded.low) == (plain.mean, plain.low)
    assert bounded.high - plain.high == pytest.approx((1 - 0.025 ** (1 / 8)) / 2)


@pytest.mark.parametrize(
    ("groups", "resamples", "message"),
    [
        ([], 10, "at least one group"),
        ([[]], 10, "at least one prompt"),
        ([[0.5]], 0, "at least 1"),
        ([[0.5, float("nan")]], 10, "finite"),
    ],
)
def test_bootstrap_refuses_values_without_an_interval(groups, resamples, message):
    with pytest.raises(ValueError, match=message):
        bootstrap_mean_of_means(groups, resamples, seed=0)


@pytest.mark.parametrize("t", [-30.0, -1.5, 0.0, 0.3, 1.0, 4.0, 50.0])
def test_tails_with_closed_forms(t):
    """One and two degrees of freedom."""
    assert student_tail(t, 1) == pytest.approx(0.5 - math.atan(t) / math.pi, rel=1e-12, abs=1e-16)
    assert student_tail(t, 2) == pytest.approx(0.5 - t / (2 * math.sqrt(2 + t * t)), rel=1e-9, abs=1e-15)


def test_the_p_value_of_the_paper():
    """t = 4.84 over more than 10,000 prompts: one-tailed p = 6.5e-7 (BroRL, section 4.2.2)."""
    assert student_tail(4.84, 10_000) == pytest.approx(6.5e-7, rel=0.02)


def test_paired_test_written_out():
    before = [0.25, 0.5, 1.0, 0.0, 0.75]
    after = [0.5, 0.5, 1.0, 0.25, 0.5]
    differences = [b - a for a, b in zip(before, after, strict=True)]
    mean = math.fsum(differences) / 5
    standard_error = math.sqrt(math.fsum((x - mean) ** 2 for x in differences) / 4 / 5)
    result = paired(before, after, resamples=500, seed=7)
    assert result.t == pytest.approx(mean / standard_error, rel=1e-12)
    assert result.degrees == 4
    assert result.one_tailed == student_tail(result.t, 4)
    assert result.two_tailed == pytest.approx(2 * result.one_tailed)
    assert result.difference == bootstrap_mean(differences, resamples=500, seed=7)
    swapped = paired(after, before, resamples=500, seed=7)
    assert (swapped.t, swapped.two_tailed) == (-result.t, result.two_tailed)
    assert swapped.one_tailed == pytest.approx(1 - result.one_tailed)


def test_differences_that_do_not_vary():
    for change, expected in ((0.0, (0.0, 0.5, 1.0)), (0.25, (math.inf, 0.0, 0.0)), (-0.25, (-math.inf, 1.0, 0.0))):
        result = paired([0.5, 0.25], [0.5 + change, 0.25 + change], resamples=10, seed=0)
        assert (result.t, result.one_tailed, result.two_tailed) == expected
    with pytest.raises(ValueError, match="1 and 1 values"):
        paired([0.5], [0.5], resamples=10, seed=0)
