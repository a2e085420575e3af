"""Estimates from samples: pass@k of one prompt, and the mean over prompts with its bootstrap interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Bounds = tuple[float, float]
SHARE: Bounds = (0.0, 1.0)
RESAMPLES = 2000  # of the prompts, for a bootstrap interval


@dataclass(frozen=True)
class Interval:
    """A mean and the ends of its 95% interval."""

    mean: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return {"mean": self.mean, "low": self.low, "high": self.high}


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of P(at least one of k samples is right), given c right ones among n samples.

    1 - C(n - c, k) / C(n, k), eq. 1 of Chen et al., "Evaluating Large Language Models Trained on Code" (2021).
    In integers until the one division, which Python rounds correctly: the result is exact to the last bit.
    """
    if not 0 <= c <= n:
        raise ValueError(f"right samples c = {c}: must be in [0, n = {n}]")
    if not 1 <= k <= n:
        raise ValueError(f"k = {k}: must be in [1, n = {n}]")
    subsets = math.comb(n, k)
    return (subsets - math.comb(n - c, k)) / subsets


def widest(passes: Mapping[str, float]) -> tuple[int, float] | None:
    """The largest k above 1 and its pass@k, of {str(k): pass@k}; None where there is none.

    It stands beside pass@1 everywhere: training that sharpens a policy raises pass@1 and may lower pass@k.
    """
    k = max((int(k) for k in passes), default=1)
    return (k, passes[str(k)]) if k > 1 else None


def bootstrap_mean(values: Sequence[float], resamples: int, seed: int, bounds: Bounds | None = None) -> Interval:
    """Mean of one value per prompt, with the 95% percentile bootstrap interval over prompts.

    Resampling equal values gives an interval of no width. With bounds, which no prompt's value can leave, it is widened
    to what else the prompts may hold: n draws show one value v alone with a probability below 0.025 where other values
    have more than u = 1 - 0.025^(1/n) together, so that the mean lies in [v - u (v - low), v + u (high - v)]. For v = 0
    or 1 and bounds (0, 1) that is the interval of Clopper and Pearson (1934).

    A function of its arguments only: the generator is counter-based (Philox) and keyed by the seed.
    """
    return bootstrap_mean_of_means([values], resamples, seed, bounds)


def bootstrap_mean_of_means(
    groups: Sequence[Sequence[float]], resamples: int, seed: int, bounds: Bounds | None = None
) -> Interval:
    """The groups' means averaged, each group alike whatever its size; the prompts of each are resampled on their own.

    bounds: as of bootstrap_mean, for each group of equal values. A function of its arguments only.
    """
    # Values that an interval can be of.
    xs = [np.asarray(values, dtype=np.float64) for values in groups]
    for x in xs:
        if x.ndim != 1 or x.size == 0:
            raise ValueError(f"values of shape {x.shape}: need one value per prompt, and at least one prompt")
        if not np.isfinite(x).all():
            raise ValueError("values must be finite")
    if not xs:
        raise ValueError("no values: need at least one group")
    if resamples < 1:
        raise ValueError(f"resamples = {resamples}: must be at least 1")

    generator = np.random.Generator(np.random.Philox(key=seed % 2**64))
    # One resample at a time: memory does not grow with resamples * prompts.
    means = [np.mean([x[generator.integers(x.size, size=x.size)].mean() for x in xs]) for _ in range(resamples)]
    # The percentile method: the ends are quantiles of the resampled means themselves.
    low, high = np.percentile(means, [2.5, 97.5])

    # A group of equal values adds its share of what resampling cannot show.
    for x in xs:
        if bounds and x.min() == x.max():
            unseen = (1 - 0.025 ** (1 / x.size)) / len(xs)
            low, high = low - unseen * (x[0] - bounds[0]), high + unseen * (bounds[1] - x[0])
    return Interval(float(np.mean([x.mean() for x in xs])), float(low), float(high))
