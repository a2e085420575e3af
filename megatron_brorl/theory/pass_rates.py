"""Success rates of prompts, and the share of prompts whose group of N rollouts would have a learning signal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)


def mixed_share(counts: Sequence[Sequence[int]], n: int) -> float:
    """Return the mean over prompts of the probability that n rollouts have different rewards.

    counts: for each prompt, the recorded rollouts with each reward. For n up to their number this is the unbiased
    estimate: the share of subsets of n rollouts whose rewards differ. For larger n it is whether any of them differ,
    which is a lower bound in expectation, because rare rewards may not have been recorded.
    """
    shares = []
    for own in map(np.array, counts):
        total = own.sum()
        drawn = np.arange(min(n, total))
        # The products are C(count, n) / C(total, n): the n rollouts all have this reward.
        large = own[own >= len(drawn), None]
        shares.append(1 - np.prod((large - drawn) / (total - drawn), axis=1).sum())
    return float(np.mean(shares))
