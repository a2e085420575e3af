"""Estimates of the mass that a group of siblings left unsampled, with 95% intervals.

An outcome is whatever counts as the same result: a final answer, or a whole response. The intervals were chosen by
their coverage; docs/theory.md has the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

Z95 = 1.959964
TAIL = 0.025  # probability beyond either end of an interval


@dataclass(frozen=True)
class GoodTuring:
    """Estimates for one group. `low` and `high` are the 95% interval of the mass that this group has not seen."""

    distinct: int
    singletons: int
    doubletons: int
    unseen_mass: float  # singletons / N
    low: float
    high: float
    unseen_right: float  # share of unseen_mass on right outcomes
    unseen_wrong: float


def good_turing(outcomes: Ints, right: Bools) -> GoodTuring:
    """Return the Good-Turing estimate of the mass of outcomes that none of the N siblings had (Good 1953).

    outcomes [N] int64: equal numbers are equal outcomes; right [N] bool. n_1 / N is an unbiased estimate of the mass
    that N - 1 siblings leave unseen. `unseen_mass` computes the interval.
    """
    counts, right_share = _counts(outcomes, right)
    n = len(outcomes)
    once = int((counts == 1).sum())
    twice = int((counts == 2).sum())
    low, high = unseen_mass(n, once, twice)
    right_mass = float(right_share[counts == 1].sum()) / n
    return GoodTuring(len(counts), once, twice, once / n, low, high, right_mass, once / n - right_mass)


def hold_out(groups: Sequence[tuple[Ints, Bools]], held_out: Sequence[int]) -> dict[str, Floats]:
    """Estimate the unsampled mass at smaller N by treating h of the N siblings as unsampled, averaged over all choices.

    groups: outcomes [N] int64 of each prompt, and whether they are right, [N] bool; held_out: H numbers h with
    2 <= h < N. Returns (mean over groups, low, high) [3, H] by key. `low` and `high` are the ends of the 95% interval
    over draws of siblings for fixed prompts.

    h siblings are held out and m = N - h others remain. p is the probability of an outcome, and c_j is the
    number of the N siblings with outcome j. Each mean is an unbiased estimate of its expectation over m fresh siblings:
      "unsampled_mass": sum of p (1 - p)^m over all outcomes
      "u_pos2": sum of p^2 (1 - p)^m over right outcomes
      "u_neg2": sum of p^2 (1 - p)^m over wrong outcomes

    The share of held-out siblings whose outcome none of the m others has, averaged over all choices of h siblings, is
    sum_j (c_j / N) C(N - c_j, m) / C(N - 1, m). For pairs of equal held-out siblings it is
    sum_j c_j (c_j - 1) / (N (N - 1)) C(N - c_j, m) / C(N - 2, m). Both are sums of g(c_j) over outcomes.
    The intervals treat the numbers of outcomes seen c times as Poisson counts (`weighted_counts`), which vary at least
    as much as the multinomial counts in every case that the tests cover. If nothing was seen, the upper end is 3.69
    times the largest g over the groups: -ln(0.025) = 3.69 is the 97.5% limit of a Poisson mean after a count of 0.

    Raises ValueError if a number cannot be held out from a group.
    """
    sizes = np.asarray(held_out, dtype=np.int64)  # [H]
    if not groups or sizes.size == 0:
        raise ValueError("hold_out: needs at least one group and one number of held-out siblings")

    sums = np.zeros((3, 2, sizes.size))  # [mass | right pairs | wrong pairs, sum of g | sum of g^2, H]
    largest = np.zeros((2, sizes.size))  # the largest possible g, [mass | pairs, H]
    for outcomes, right in groups:
        n = len(outcomes)
        # A pair needs two held-out siblings, and at least one sibling must remain for the comparison.
        if sizes.min() < 2 or sizes.max() >= n:
            raise ValueError(f"hold_out: from {n} siblings 2 to {n - 1} can be held out, not {list(held_out)}")
        counts, right_share = _counts(outcomes, right)
        single_weights = unseen_weights(counts, n, n - sizes, order=1)
        pair_weights = unseen_weights(counts, n, n - sizes, order=2)
        parts = np.stack([single_weights, pair_weights * right_share, pair_weights * (1 - right_share)])
        sums += np.stack([parts.sum(-1), np.square(parts).sum(-1)], axis=1)
        possible = np.arange(1, n + 1)
        largest_of_group = np.stack([unseen_weights(possible, n, n - sizes, order).max(-1) for order in (1, 2)])
        largest = np.maximum(largest, largest_of_group)

    count = len(groups)
    means = sums[:, 0] / count
    low, high = weighted_counts(means, sums[:, 1] / count**2, largest[[0, 1, 1]] / count)  # [mass, pairs, pairs]
    estimates = np.minimum(np.stack([means, low, high], axis=1), 1.0)  # [3, 3, H]; rounding may exceed 1
    return dict(zip(("unsampled_mass", "u_pos2", "u_neg2"), estimates, strict=True))


def unseen_weights(counts: Ints, n: int, sampled: Ints, order: int) -> Floats:
    """Return the probability [H, K] that `order` random siblings of n have outcome k and m other ones do not.

    counts [K] int64: siblings with each outcome; sampled [H] int64: the numbers m <= n - order.
    """
    all_have_outcome = np.ones(len(counts))  # probability for the `order` siblings
    for i in range(order):
        all_have_outcome = all_have_outcome * (counts - i) / (n - i)
    # Of the r remaining siblings, c have outcome k. m random ones miss all c with probability C(r - c, m) / C(r, m).
    r = n - order
    m = sampled[:, None]
    possible = (counts >= order) & (r - (counts - order) - m >= 0)
    c = np.where(possible, counts - order, 0)
    rest = np.where(possible, r - c - m, 0)
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, r + 1)))])  # log of factorials
    return all_have_outcome * np.exp(np.where(possible, logs[r - c] - logs[rest] - logs[r] + logs[r - m], -np.inf))


def _counts(outcomes: Ints, right: Bools) -> tuple[Ints, Floats]:
    """Return the number of siblings [K] with each distinct outcome, and the share [K] of them that is right."""
    _, code, counts = np.unique(outcomes, return_inverse=True, return_counts=True)
    return counts.astype(np.int64), np.bincount(code, weights=right.astype(np.float64)) / counts


def unseen_mass(n: int, once: int, twice: int) -> tuple[float, float]:
    """Return the 95% interval of the mass of outcomes that none of n draws had.

    once, twice: the numbers n_1 and n_2 of outcomes that occurred once and twice. The interval of Esty (1983),
    n_1 / n -+ 1.96 sqrt(n_1 (1 - n_1 / n) + 2 n_2) / n, has no width when all outcomes differ. This one contains every
    mass m with |n_1 - n m| <= 1.96 sqrt(n m (1 - m) + 2 (n_2 + 1)): it takes Esty's variance at m instead of at its
    estimate, as Wilson (1927) does for shares, and adds one to n_2. The upper end is at least 1 - 0.025^(1/n), because
    n draws cannot exclude a smaller mass.
    """
    # The ends are the roots of square m^2 - linear m + constant.
    square = n * n + Z95**2 * n
    linear = 2 * n * once + Z95**2 * n
    constant = once**2 - Z95**2 * 2 * (twice + 1)
    root = (linear**2 - 4 * square * constant) ** 0.5
    high = (linear + root) / (2 * square)
    return max((linear - root) / (2 * square), 0.0), min(max(high, 1 - TAIL ** (1 / n)), 1.0)


def weighted_counts(total: Floats, variance: Floats, largest: Floats) -> tuple[Floats, Floats]:
    """Return the 95% interval of the mean of a weighted sum of Poisson counts (Fay and Feuer 1997, section 2).

    total = sum w n and variance = sum w^2 n for counts n with weights w >= 0; largest is the largest w > 0; all [...].
    The ends are quantiles of a gamma distribution with that mean and variance. The upper end adds one count of the
    largest weight, which gives 3.69 times that weight if nothing was counted. For equal weights this is Garwood's
    exact interval.
    """
    mean = np.stack([total, total + largest])
    scale = np.divide(np.stack([variance, variance + largest**2]), mean, out=np.zeros_like(mean), where=mean > 0)
    shape = np.divide(mean, scale, out=np.ones_like(mean), where=scale > 0)
    low, high = scale * _gamma_ends(shape)
    return low, high


def _gamma_ends(shape: Floats) -> Floats:
    """Return the 2.5% quantile for shape[0] and the 97.5% quantile for shape[1] of gamma distributions with scale 1.

    shape and result [2, ...]; found by bisection.
    """
    a = torch.as_tensor(shape, dtype=torch.float64)
    probability = torch.tensor([TAIL, 1 - TAIL], dtype=torch.float64).view(2, *[1] * (a.ndim - 1))
    low = torch.zeros_like(a)
    high = a + 12 * a.sqrt() + 20  # above both quantiles
    for _ in range(42):  # to 1e-11
        middle = (low + high) / 2
        below = torch.special.gammainc(a, middle) < probability
        low = torch.where(below, middle, low)
        high = torch.where(below, high, middle)
    return ((low + high) / 2).numpy()
