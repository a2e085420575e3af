"""Two policies on the same prompts: the paired t-test and the paired bootstrap over prompts.

Prompts are taken as independent draws; one training run per policy says nothing about how runs differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_brorl.algo.estimators import Bounds, Interval, bootstrap_mean

_TERMS = 10_000  # of the continued fraction, which needs about the square root of the degrees of freedom
_TINY = 1e-300


@dataclass(frozen=True)
class Paired:
    """What the differences of the prompts say."""

    difference: Interval  # mean and 95% bootstrap interval over prompts
    t: float
    degrees: int
    one_tailed: float  # probability of a larger t where there is no difference
    two_tailed: float

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**vars(self), "difference": self.difference.as_dict()}


SHARES: Bounds = (-1.0, 1.0)  # of the difference of two shares


def paired(
    before: Sequence[float], after: Sequence[float], resamples: int, seed: int, bounds: Bounds | None = None
) -> Paired:
    """Student's paired t-test (1908) of after - before, one value per prompt each, and the bootstrap of its mean.

    bounds: of a difference, as estimators.bootstrap_mean takes them. Where all differences are equal t is 0 (all are 0)
    or infinite. Raises ValueError for fewer than two prompts or lengths that differ.
    """
    if len(before) != len(after) or len(before) < 2:
        raise ValueError(f"{len(before)} and {len(after)} values: need as many of both, and at least two")
    d = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    n, mean, error = len(d), float(d.mean()), float(d.std(ddof=1)) / math.sqrt(len(d))
    t = mean / error if error else math.copysign(math.inf, mean) if mean else 0.0
    return Paired(
        difference=bootstrap_mean(d.tolist(), resamples, seed, bounds),
        t=t,
        degrees=n - 1,
        one_tailed=student_tail(t, n - 1),
        two_tailed=2 * student_tail(abs(t), n - 1),
    )


def student_tail(t: float, degrees: int) -> float:
    """P(T > t) of Student's distribution: I_x(n / 2, 1 / 2) / 2 at x = n / (n + t^2) for t >= 0 (DLMF 8.17)."""
    if math.isinf(t):
        return 0.0 if t > 0 else 1.0
    tail = incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t)) / 2
    return tail if t >= 0 else 1 - tail


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22, Lentz's method)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)

    # The fraction converges fast below the mean of the distribution; above it the symmetric one does.
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(b, a, 1 - x)

    # The logarithm of x^a (1 - x)^b / B(a, b).
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)

    # Lentz: numerator and denominator as ratios of neighbours, kept away from 0.
    c, d = 1.0, 1 / _away_from_zero(1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, _TERMS):
        # Both coefficients of a pair; it is over pairs that the fraction settles.
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for numerator in (even, odd):
            d = 1 / _away_from_zero(1 + numerator * d)
            c = _away_from_zero(1 + numerator / c)
            fraction *= d * c
        if abs(d * c - 1) < 1e-15:  # converged to float64
            break

    return math.exp(log_front) * fraction / a


def _away_from_zero(x: float) -> float:
    return x if abs(x) > _TINY else _TINY
