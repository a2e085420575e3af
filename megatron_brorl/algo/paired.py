"""Two policies on the same prompts: the paired t-test and the paired bootstrap over prompts.

Prompts are taken as independent draws; one training run per policy says nothing about how runs differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mpmath
import numpy as np

from megatron_brorl.algo.statistics import Bounds, Interval, bootstrap_mean


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
    """Return P(T > t) of Student's distribution: I_x(n / 2, 1 / 2) / 2 at x = n / (n + t^2) for t >= 0 (DLMF 8.17)."""
    if math.isinf(t):
        return 0.0 if t > 0 else 1.0
    x = degrees / (degrees + t * t)
    tail = float(mpmath.betainc(degrees / 2, 0.5, 0, x, regularized=True)) / 2
    return tail if t >= 0 else 1 - tail
