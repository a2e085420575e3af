"""pass@k: its estimate from samples, and advantages whose policy gradient raises it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


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


def widest(passes: Mapping[str, float]) -> tuple[int, float] | None:
    """Return the largest k above 1 and its value from {str(k): pass@k}; None if there is none.

    It is shown next to pass@1, because training that sharpens a policy raises pass@1 and may lower pass@k.
    """
    k = max((int(k) for k in passes), default=1)
    return (k, passes[str(k)]) if k > 1 else None


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
    # C(n - c, k) / C(n - 1, k), the chance that k of a right rollout's siblings are all wrong.
    right = k * math.prod(max(n - c - i, 0) / (n - 1 - i) for i in range(k))
    values = torch.tensor([-right * c / (n - c), right], dtype=torch.float64)
    return values[(rewards == 1).long()].to(rewards.dtype)
