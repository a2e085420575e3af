"""Objectives other than the success rate p itself, by what a group's advantages are: they need many rollouts a prompt.

With c of n rollouts right, each of these gives all right ones one advantage and all wrong ones another, and these add
up to 0: given c, the mean over the group of advantage times grad log p then expects (c / n) (advantage of a right one)
times grad p / (p (1 - p)). What that makes over all c is the gradient named below, exact for every n. A group that is
all right or all wrong has advantages of exactly 0, so that leaving it out (algo.dynamic_sampling) changes no sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_brorl.algo.selection import has_signal


def over_group_mean(rewards: Tensor) -> Tensor:
    """[N]: rewards [N], none negative, minus their mean, over their mean. Exactly zero where all are equal.

    MaxRL (Tajwar et al. 2026, arXiv 2602.02710): for rewards of 0 and 1 the mean over the rollouts of advantage times
    grad log p is an unbiased estimate of the gradient of sum_{k=1}^{N-1} -(1 - p)^k / k, the logarithm of the success
    rate p up to order N - 1 (N where a group without a right answer subtracted its mean score too).
    """
    if not has_signal(rewards):
        return torch.zeros_like(rewards)
    x = rewards.double()
    return (x / x.mean() - 1).to(rewards.dtype)


def pass_at_k_advantages(rewards: Tensor, k: int) -> Tensor:
    """[N]: k times what each rollout adds to pass@k, over that of the others. Rewards are 0 or 1, and 1 is right.

    The mean over all sets of k rollouts with it of whether one of them is right, minus that over all sets of k of the
    others: pass@k with a leave-one-out baseline (PKPO, Walder and Karkhanis 2025, arXiv 2505.15201, with the baseline
    over sets of k of the others, which for k = 1 is the usual one). The mean over the rollouts of advantage times
    grad log p is an unbiased estimate of grad (1 - (1 - p)^k), for any N > k; of fewer rollouts k is N - 1.
    """
    n, c = len(rewards), int((rewards == 1).sum())
    k = min(k, n - 1)
    if c in (0, n) or k < 1:
        return torch.zeros_like(rewards)
    return _two_values(rewards, k * _alone(n, c, k)[-1])


def _alone(n: int, c: int, order: int) -> list[float]:
    """For k = 1 ... order < n: the chance that k - 1 of a right rollout's n - 1 siblings and one more are all wrong.

    C(n - c, k) / C(n - 1, k): what a right rollout adds to pass@k over k of the others.
    """
    found, chance = [], 1.0
    for i in range(order):
        chance *= max(n - c - i, 0) / (n - 1 - i)
        found.append(chance)
    return found


def _two_values(rewards: Tensor, value: float) -> Tensor:
    """`value` for right rollouts, and what makes the sum 0 for wrong ones [N]."""
    right = rewards == 1
    c = int(right.sum())
    both = torch.tensor([-value * c / (len(rewards) - c), value], dtype=torch.float64)
    return both[right.long()].to(rewards.dtype)
