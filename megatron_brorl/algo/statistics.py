"""Means over prompts with bootstrap intervals, and paired tests of two policies on the same prompts.

Prompts count as independent draws. One training run per policy does not show how runs differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import mpmath
import numpy as np

Bounds = tuple[float, float]
SHARE: Bounds = (0.0, 1.0)  # bounds of a share
SHARES: Bounds = (-1.0, 1.0)  # bounds of the difference of two shares
RESAMPLES = 2000  # of the prompts, for a bootstrap interval


@dataclass(frozen=True)
class Interval:
    """A mean with its 95% interval."""

    mean: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def bootstrap_mean(values: Sequence[float], resamples: int, seed: int, bounds: Bounds | None = None) -> Interval:
    """Return the mean of one value per prompt, with the 95% percentile bootstrap interval over prompts.

    Equal values have an interval of no width. Given the bounds of a value, the interval is widened by the other values
    that the prompts may have: n draws show only one value v with a probability below 0.025 if other values have a
    share of more than u = 1 - 0.025^(1/n), so the mean lies in [v - u (v - low), v + u (high - v)]. For v = 0 or 1 and
    bounds (0, 1) this is the interval of Clopper and Pearson (1934).

    The result depends only on the arguments: the generator is counter-based (Philox) and keyed by the seed. Raises
    ValueError without values, for values that are not finite, and for resamples below 1.
    """
    return bootstrap_mean_of_means([values], resamples, seed, bounds)


def bootstrap_mean_of_means(
    groups: Sequence[Sequence[float]], resamples: int, seed: int, bounds: Bounds | None = None
) -> Interval:
    """Return the mean of the groups' means as `bootstrap_mean` does; the prompts of each group are resampled."""
    arrays = [np.asarray(values, dtype=np.float64) for values in groups]
    for x in arrays:
        if x.ndim != 1 or x.size == 0:
            raise ValueError(f"values of shape {x.shape}: need one value per prompt, and at least one prompt")
        if not np.isfinite(x).all():
            raise ValueError("values must be finite")
    if not arrays:
        raise ValueError("no values: need at least one group")
    if resamples < 1:
        raise ValueError(f"resamples = {resamples}: must be at least 1")

    generator = np.random.Generator(np.random.Philox(key=seed % 2**64))
    # A few resamples at a time, so that memory does not grow with resamples * prompts. The draws of groups alternate.
    batch_size = 1 if len(arrays) > 1 else 1 + 2**16 // arrays[0].size
    means: list[float] = []
    while len(means) < resamples:
        rows = min(batch_size, resamples - len(means))
        group_means = [x[generator.integers(x.size, size=(rows, x.size))].mean(axis=1) for x in arrays]
        means += np.stack(group_means, axis=1).mean(axis=1).tolist()
    low, high = np.percentile(means, [2.5, 97.5])

    for x in arrays:
        if bounds and x.min() == x.max():
            unseen = (1 - 0.025 ** (1 / x.size)) / len(arrays)
            low = low - unseen * (x[0] - bounds[0])
            high = high + unseen * (bounds[1] - x[0])
    return Interval(float(np.mean([x.mean() for x in arrays])), float(low), float(high))


@dataclass(frozen=True)
class Paired:
    """Result of the paired test on the differences per prompt."""

    difference: Interval  # mean and 95% bootstrap interval over prompts
    t: float
    degrees: int  # degrees of freedom
    one_tailed: float  # probability of a larger t if there is no difference
    two_tailed: float


def paired(
    before: Sequence[float], after: Sequence[float], resamples: int, seed: int, bounds: Bounds | None = None
) -> Paired:
    """Return Student's paired t-test (1908) and the bootstrap of the mean of after - before, one value per prompt each.

    bounds: of a difference, as in bootstrap_mean. If all differences are equal, t is 0 (all are 0) or infinite. Raises
    ValueError for fewer than two prompts or different lengths.
    """
    if len(before) != len(after) or len(before) < 2:
        raise ValueError(f"{len(before)} and {len(after)} values: need as many of both, and at least two")
    d = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    n = len(d)
    mean = float(d.mean())
    standard_error = float(d.std(ddof=1)) / math.sqrt(n)
    t = mean / standard_error if standard_error else (math.copysign(math.inf, mean) if mean else 0.0)
    return Paired(
        difference=bootstrap_mean(d.tolist(), resamples, seed, bounds),
        t=t,
        degrees=n - 1,
        one_tailed=student_tail(t, n - 1),
        two_tailed=2 * student_tail(abs(t), n - 1),
    )


def student_tail(t: float, degrees: int) -> float:
    """Return P(T > t) of Student's distribution, for t >= 0 I_x(d / 2, 1 / 2) / 2 at x = d / (d + t^2) (DLMF 8.17)."""
    if math.isinf(t):
        return 0.0 if t > 0 else 1.0
    x = degrees / (degrees + t * t)
    tail = float(mpmath.betainc(degrees / 2, 0.5, 0, x, regularized=True)) / 2
    return tail if t >= 0 else 1 - tail
