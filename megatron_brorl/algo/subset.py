"""The choice of the rollouts of a group that an update uses (config key algo.train_on)."""

from __future__ import annotations

import torch
from torch import Tensor

_ROUNDING = 1e-12  # relative difference of spreads that count as equal


def largest_spread(rewards: Tensor, count: int) -> Tensor:
    """Return which rollouts form the subset of this size whose rewards have the largest variance, bool [N].

    PODS (Xu et al. 2025, arXiv 2504.13818, theorem 1): it consists of the i highest and the count - i lowest rewards
    for some i. The smallest i with the largest variance is taken, and of equal rewards those of the first rollouts.
    rewards: [N]. All rollouts are chosen if N is at most `count`.
    """
    n = len(rewards)
    if n <= count:
        return torch.ones(n, dtype=torch.bool)
    values, reward_class = rewards.unique(return_inverse=True)
    ascending, order = reward_class.sort(stable=True)
    x = values[ascending].double()
    x = x - x.mean()
    sums, squares = (torch.cat((x.new_zeros(1), t.cumsum(0))) for t in (x, x.square()))
    high = torch.arange(count + 1)
    total, square = (t[count - high] + t[n] - t[n - high] for t in (sums, squares))
    variance = square / count - (total / count).square()
    i = int((variance >= variance.max() * (1 - _ROUNDING)).nonzero()[0])

    of_class = torch.bincount(reward_class)
    wanted = torch.bincount(torch.cat((ascending[: count - i], ascending[n - i :])), minlength=len(values))
    place_in_class = torch.arange(n) - (of_class.cumsum(0) - of_class)[ascending]
    chosen = torch.zeros(n, dtype=torch.bool)
    chosen[order] = place_in_class < wanted[ascending]
    return chosen
