"""Advantages of rollouts against their group, and the moments that whiten them over the global batch.

A new estimator is a function here and an entry of config.algorithms.ADVANTAGES.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_brorl.algo import functions
from megatron_brorl.algo.pass_at_k import pass_at_k_advantages
from megatron_brorl.config import algorithms
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


def largest_spread(rewards: Tensor, count: int) -> Tensor:
    """Return which of the rewards [N] form the subset of size `count` with the largest variance, bool [N].

    It consists of the i highest and the count - i lowest rewards for some i (PODS, Xu et al. 2025, arXiv 2504.13818,
    theorem 1). The smallest such i is taken, and the first ones of equal rewards. All are chosen if N <= count.
    """
    n = len(rewards)
    if n <= count:
        return torch.ones(n, dtype=torch.bool)
    x, order = rewards.double().sort(stable=True)
    x = x - x.mean()
    sums, squares = (torch.cat((x.new_zeros(1), t.cumsum(0))) for t in (x, x.square()))
    high = torch.arange(count + 1)
    total, square = (t[count - high] + t[n] - t[n - high] for t in (sums, squares))
    variance = square / count - (total / count).square()
    i = int((variance >= variance.max() * (1 - 1e-12)).nonzero()[0])  # 1e-12: equal up to rounding

    chosen = torch.zeros(n, dtype=torch.bool)
    chosen[order[: count - i]] = True
    order = rewards.argsort(stable=True, descending=True)
    chosen[order[~chosen[order]][:i]] = True
    return chosen


def group_advantages(rewards: Tensor, mask: Tensor, rows: Sequence[Mapping[str, Any]], algo: AlgoConfig) -> Tensor:
    """Return the advantages by algo.advantage before whitening, float64 [groups, N]; 0 where the mask is false.

    rewards: [groups, N]. mask: bool [groups, N], false where a rollout is lost. rows: the data row of each group's
    prompt. Raises UserError if a function of the user fails.
    """
    entry = algorithms.advantage(algo.advantage)
    function = functions.find("algo.advantage", entry.function)
    k = {"k": algo.pass_k} if entry.takes_k else {}
    found = function(rewards.shape, "an advantage per reward", rewards=rewards.double(), mask=mask, rows=rows, **k)
    for group, rollout in (mask & ~found.isfinite()).nonzero()[:1].tolist():
        function.refuse(f"returned {found[group, rollout]:g} for rollout {rollout} of row {rows[group]['id']!r}")
    return torch.where(mask, found.detach().double(), 0.0)


def _by_group(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a function of the rewards [survivors] of a group a function of the table of all groups."""

    def advantages(rewards: Tensor, mask: Tensor, rows: Sequence[Mapping[str, Any]], **settings: Any) -> Tensor:
        table = torch.zeros_like(rewards)
        for result, earned, ended in zip(table, rewards, mask, strict=True):
            result[ended] = formula(earned[ended], **settings)
        return table

    return advantages


def _deviations(rewards: Tensor) -> Tensor:
    """Return rewards [N] minus their mean in float64, and 0 where that is within the rounding of rewards in float32."""
    # The loss would count tokens as clipped whose advantage is rounding, such as that of 0.2 among 0.1, 0.2 and 0.3.
    x = rewards.double()
    found = x - x.mean()
    return torch.where(found.abs() <= torch.finfo(torch.float32).eps * x.abs().max(), 0.0, found)


def group_baseline(rewards: Tensor) -> Tensor:
    """Return rewards [N] minus their mean (BroRL, section 3.1); exactly 0 if all are equal."""
    if not has_signal(rewards):
        return torch.zeros_like(rewards)
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


# The functions that config.algorithms.ADVANTAGES names.
reinforce_pp_baseline = _by_group(group_baseline)
grpo = _by_group(group_normalised)
rloo = _by_group(leave_one_out)
maxrl = _by_group(over_group_mean)
pass_at_k = _by_group(pass_at_k_advantages)
gae = _by_group(lambda rewards: rewards)  # The critic's values take the place of a group baseline.
