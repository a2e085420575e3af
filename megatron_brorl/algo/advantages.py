"""Advantages of rollouts against their group, and the moments that whiten them over the global batch.

A new estimator is a function here with an entry in ADVANTAGES, and a name in config.schema.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_brorl.algo import functions
from megatron_brorl.algo.pass_at_k import pass_at_k_advantages
from megatron_brorl.config.schema import AlgoConfig


def has_signal(rewards: Tensor) -> bool:
    """Return whether the rewards [N] of a group differ (DAPO, Yu et al. 2025, section 3.2; BroRL, section 3.1).

    The comparison is exact, because the standard deviation of 512 equal rewards of 0.95 is not 0 in float32.
    """
    return bool(rewards.max() != rewards.min())


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations (M2), which merge exactly over ranks."""

    count: float
    mean: float
    m2: float

    @property
    def std(self) -> float:
        """Population standard deviation; 0 for an empty sample."""
        return (self.m2 / self.count) ** 0.5 if self.count else 0.0


def moments(values: Tensor) -> Moments:
    """Return the moments of a tensor of any shape, in float64."""
    x = values.double()
    if not x.numel():
        return Moments(0.0, 0.0, 0.0)
    mean = x.mean()
    return Moments(float(x.numel()), float(mean), float((x - mean).square().sum()))


def merge(parts: Sequence[Moments]) -> Moments:
    """Return the moments of the union (Chan et al. 1983, eq. 2.1), merged in the given order."""
    total = Moments(0.0, 0.0, 0.0)
    for part in parts:
        count = total.count + part.count
        if not part.count:
            continue
        delta = part.mean - total.mean
        mean = total.mean + delta * part.count / count
        m2 = total.m2 + part.m2 + delta * delta * total.count * part.count / count
        total = Moments(count, mean, m2)
    return total


def whiten(values: Tensor, batch: Moments) -> Tensor:
    """Return (values - mean) / std of the global batch, in the shape of values; 0 if the batch has no spread."""
    if batch.std == 0.0:
        return torch.zeros_like(values)
    return ((values.double() - batch.mean) / batch.std).to(values.dtype)


def explained_variance(returns: Moments, residuals: Moments) -> float:
    """Return 1 - Var(R - v) / Var(R): 1 for a perfect critic, 0 for a constant one, nan if the returns do not vary."""
    return 1 - residuals.m2 / returns.m2 if returns.m2 else float("nan")


def largest_spread(rewards: Tensor, mask: Tensor, count: int) -> Tensor:
    """Return which rewards of each group form the subset of size `count` with the largest variance, bool [groups, N].

    rewards: [groups, N]. mask: bool [groups, N], the n rewards of each group to choose from. The subset consists of the
    i highest and the count - i lowest of them for some i (PODS, Xu et al. 2025, arXiv 2504.13818, theorem 1). The
    smallest such i is taken, and the first ones of equal rewards. All are chosen if n <= count.
    """
    groups, width = rewards.shape
    n = mask.sum(1, keepdim=True)
    rewards = rewards.double()
    mean = torch.where(mask, rewards, 0.0).sum(1, keepdim=True) / n
    x, ascending = rewards.masked_fill(~mask, torch.inf).sort(dim=1, stable=True)
    x = torch.where(torch.arange(width) < n, x - mean, 0.0)
    # Sums over the first k rewards in ascending order, k = 0 ... N.
    prefix_sums, prefix_squares = (torch.cat((x.new_zeros(groups, 1), t.cumsum(1)), dim=1) for t in (x, x.square()))

    # Of the n rewards in ascending order, a candidate i takes [0, count - i) and [n - i, n).
    candidates = torch.arange(min(count, width) + 1).repeat(groups, 1)
    low_end = candidates.flip(1)
    high_start = (n - candidates).clamp(min=0)
    subset_sum, subset_squares = (
        prefix.gather(1, low_end) + prefix[:, -1:] - prefix.gather(1, high_start)
        for prefix in (prefix_sums, prefix_squares)
    )
    variance = subset_squares / count - (subset_sum / count).square()
    # argmax finds the first maximum. 1e-12: variances that are equal up to rounding.
    i = (variance >= variance.amax(1, keepdim=True) * (1 - 1e-12)).byte().argmax(1, keepdim=True)

    positions = torch.arange(width).repeat(groups, 1)
    lowest = torch.zeros_like(mask).scatter(1, ascending, positions < count - i)
    descending = rewards.masked_fill(~mask | lowest, -torch.inf).argsort(dim=1, stable=True, descending=True)
    highest = torch.zeros_like(mask).scatter(1, descending, positions < i)
    return torch.where(n > count, lowest | highest, mask)


def _deviations(rewards: Tensor) -> Tensor:
    """Return rewards [N] minus their mean in float64, and 0 where that is within the rounding of rewards in float32."""
    # Rounding can leave a tiny advantage where the exact advantage is 0, as for 0.2 among 0.1, 0.2 and 0.3. The loss
    # would count tokens of such a rollout as clipped, although clipping them has no effect.
    x = rewards.double()
    deviations = x - x.mean()
    return torch.where(deviations.abs() <= torch.finfo(torch.float32).eps * x.abs().max(), 0.0, deviations)


def group_baseline(rewards: Tensor) -> Tensor:
    """Return rewards [N] minus their mean (BroRL, section 3.1); exactly 0 if all are equal."""
    return _deviations(rewards).to(rewards.dtype)


def group_normalised(rewards: Tensor) -> Tensor:
    """Return rewards [N] minus their mean, over their sample standard deviation (n - 1) plus 1e-6; 0 if all are equal.

    GRPO (Shao et al. 2024, section 4.1.2).
    """
    if not has_signal(rewards):
        return torch.zeros_like(rewards)
    return (_deviations(rewards) / (rewards.double().std() + 1e-6)).to(rewards.dtype)


def leave_one_out(rewards: Tensor) -> Tensor:
    """Return rewards [N] minus the mean of the other N - 1; exactly 0 if all are equal.

    RLOO (Ahmadian et al. 2024, arXiv 2402.14740, section 3.2): R - (sum - R) / (N - 1) = (R - mean) N / (N - 1).
    """
    if not has_signal(rewards):
        return torch.zeros_like(rewards)
    return (_deviations(rewards) * (len(rewards) / (len(rewards) - 1))).to(rewards.dtype)


def over_group_mean(rewards: Tensor) -> Tensor:
    """Return rewards [N], none negative, minus their mean, over their mean; exactly 0 if all are equal.

    MaxRL (Tajwar et al. 2026, arXiv 2602.02710): for rewards of 0 and 1 the mean over the rollouts of advantage times
    grad log p is an unbiased estimate of the gradient of sum_{k=1}^{N-1} -(1 - p)^k / k, the logarithm of the success
    rate p up to order N - 1.
    """
    if not has_signal(rewards):
        return torch.zeros_like(rewards)
    x = rewards.double()
    return (x / x.mean() - 1).to(rewards.dtype)


@dataclass(frozen=True)
class Advantage:
    """One value of the config key algo.advantage."""

    # (rewards [survivors] of a group, float64) -> their advantages [survivors]
    formula: Callable[..., Tensor]
    whitened: bool = False  # over the global batch; false for advantages that are in units of their own group
    takes_k: bool = False  # the formula also receives k, the config key algo.pass_k


# The values of algo.advantage, which config.schema explains.
ADVANTAGES = {
    # REINFORCE++-baseline (Hu et al. 2025, section 3.2), per trajectory as in BroRL, section 3.1.
    "reinforce_pp_baseline": Advantage(group_baseline, whitened=True),
    "grpo": Advantage(group_normalised),
    "rloo": Advantage(leave_one_out),
    # Dr. GRPO (Liu et al. 2025, arXiv 2503.20783, section 3.2) does not divide by a standard deviation.
    "dr_grpo": Advantage(group_baseline),
    "maxrl": Advantage(over_group_mean),
    "pass_at_k": Advantage(pass_at_k_advantages, whitened=True, takes_k=True),
    # The critic's values take the place of a group baseline.
    "gae": Advantage(lambda rewards: rewards, whitened=True),
}


def is_whitened(name: str) -> bool:
    """Return whether the advantage with this name is whitened over the global batch; a user's function is not."""
    return name in ADVANTAGES and ADVANTAGES[name].whitened


def group_advantages(rewards: Tensor, mask: Tensor, rows: Sequence[Mapping[str, Any]], algo: AlgoConfig) -> Tensor:
    """Return the advantages by algo.advantage before whitening, float64 [groups, N]; 0 where the mask is false.

    rewards: [groups, N]. mask: bool [groups, N], false where a rollout is lost. rows: the data row of each group's
    prompt. Raises UserError if a function of the user fails.
    """
    rewards = rewards.double()
    if entry := ADVANTAGES.get(algo.advantage):
        settings = {"k": algo.pass_k} if entry.takes_k else {}
        table = torch.zeros_like(rewards)
        for result, group_rewards, survived in zip(table, rewards, mask, strict=True):
            result[survived] = entry.formula(group_rewards[survived], **settings)
        return table

    function = functions.find("algo.advantage", algo.advantage)
    advantages = function(rewards.shape, "an advantage per reward", rewards=rewards, mask=mask, rows=rows)
    if invalid := (mask & ~advantages.isfinite()).nonzero().tolist():
        group, rollout = invalid[0]
        function.refuse(f"returned {advantages[group, rollout]:g} for rollout {rollout} of row {rows[group]['id']!r}")
    return torch.where(mask, advantages.detach().double(), 0.0)
