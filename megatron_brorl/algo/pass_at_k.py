"""pass@k and the share of groups with a learning signal, from samples, and advantages whose gradient raises pass@k."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)  # values of n for which reports show mixed_share


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate of P(at least one of k samples is right), given c right ones among n samples.

    1 - C(n - c, k) / C(n, k), eq. 1 of Chen et al., "Evaluating Large Language Models Trained on Code" (2021). All
    steps but the last division are in integers, so the result is correctly rounded.
    """
    if not 0 <= c <= n:
        raise ValueError(f"right samples c = {c}: must be in [0, n = {n}]")
    if not 1 <= k <= n:
        raise ValueError(f"k = {k}: must be in [1, n = {n}]")
    subsets = math.comb(n, k)
    return (subsets - math.comb(n - c, k)) / subsets


def pass_at_each_k(counts: Sequence[tuple[int, int]]) -> dict[int, list[float]]:
    """Return pass@k of every prompt with at least k samples, for k = 1, 2, 4, ... and the largest number of samples.

    counts: the samples of each prompt, and how many of them are right.
    """
    largest = max(n for n, _ in counts)
    ks = sorted({*(2**i for i in range(largest.bit_length())), largest})
    return {k: [pass_at_k(n, right, k) for n, right in counts if n >= k] for k in ks}


def widest(rates: Mapping[str, float]) -> tuple[int, float] | None:
    """Return the largest k above 1 and its pass@k, from rates {str(k): pass@k}; None if there is none.

    Reports show it next to pass@1, because training that sharpens a policy raises pass@1 and may lower pass@k.
    """
    k = max((int(k) for k in rates), default=1)
    return (k, rates[str(k)]) if k > 1 else None


def pass_at_k_advantages(rewards: Tensor, k: int) -> Tensor:
    """Return k times each rollout's contribution to pass@k over that of its siblings, [N]; rewards [N] are 0 or 1.

    PKPO (Walder and Karkhanis 2025, arXiv 2505.15201), with pass@k of k of the other rollouts as the baseline. The mean
    over the rollouts of advantage times grad log p is an unbiased estimate of grad (1 - (1 - p)^k) for N > k; with
    fewer rollouts k is N - 1. All right rollouts have one advantage, all wrong ones another, and they sum to 0.
    """
    n = len(rewards)
    c = int((rewards == 1).sum())
    k = min(k, n - 1)
    if c in (0, n) or k < 1:
        return torch.zeros_like(rewards)
    # The product is C(n - c, k) / C(n - 1, k), the chance that k of a right rollout's siblings are all wrong.
    advantage_of_right = k * math.prod(max(n - c - i, 0) / (n - 1 - i) for i in range(k))
    advantage_of_wrong = -advantage_of_right * c / (n - c)
    by_reward = torch.tensor([advantage_of_wrong, advantage_of_right], dtype=torch.float64)
    return by_reward[(rewards == 1).long()].to(rewards.dtype)


def mixed_share(counts: Sequence[Sequence[int]], n: int) -> float:
    """Return the mean over prompts of the probability that n rollouts have different rewards.

    counts: for each prompt, the recorded rollouts with each reward. For n up to the number of recorded rollouts
    this is the unbiased estimate: the share of their subsets of size n whose rewards differ. For larger n it is 1 if
    any recorded rewards differ, else 0, which is a lower bound in expectation: rare rewards may not be recorded.
    """
    shares = []
    for count in map(np.array, counts):
        total = count.sum()
        drawn = np.arange(min(n, total))
        # The products are C(count, n) / C(total, n), the probability that the n rollouts all have this reward.
        enough = count[count >= len(drawn), None]
        shares.append(1 - np.prod((enough - drawn) / (total - drawn), axis=1).sum())
    return float(np.mean(shares))
