"""Advantages of REINFORCE++-baseline: group-mean baseline, then whitening over the global batch.

Hu et al. 2025 (REINFORCE++), section 3.2; written per trajectory as in BroRL, section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_brorl.algo.selection import has_signal


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations (M2): what merges exactly over ranks."""

    count: float
    mean: float
    m2: float

    @property
    def std(self) -> float:
        """Population standard deviation; 0 of an empty sample."""
        return (self.m2 / self.count) ** 0.5 if self.count else 0.0


def moments(values: Tensor) -> Moments:
    """Moments of a tensor [...] of any shape, in float64."""
    x = values.double()
    if not x.numel():
        return Moments(0.0, 0.0, 0.0)
    mean = x.mean()
    return Moments(float(x.numel()), float(mean), float((x - mean).square().sum()))


def merge(parts: Sequence[Moments]) -> Moments:
    """Moments of the union (Chan et al. 1983, eq. 2.1), in the order given: the same on every rank."""
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


def group_baseline(rewards: Tensor) -> Tensor:
    """Rewards [N] minus their mean, [N] (BroRL, section 3.1); exactly zero where all are equal."""
    if not has_signal(rewards):
        return torch.zeros_like(rewards)
    return (rewards.double() - rewards.double().mean()).to(rewards.dtype)


def group_normalised(rewards: Tensor) -> Tensor:
    """[N]: rewards [N] minus their mean, over their sample standard deviation (n - 1, as torch.std) plus 1e-6.

    GRPO (Shao et al. 2024, section 4.1.2). Exactly zero where all are equal, which a single reward always is.
    """
    if not has_signal(rewards):
        return torch.zeros_like(rewards)
    x = rewards.double()
    return ((x - x.mean()) / (x.std() + 1e-6)).to(rewards.dtype)


def explained_variance(returns: Moments, residuals: Moments) -> float:
    """1 - Var(R - v) / Var(R): 1 of a perfect critic, 0 of a constant one; nan where the returns do not vary."""
    return 1 - residuals.m2 / returns.m2 if returns.m2 else float("nan")


def whiten(values: Tensor, batch: Moments) -> Tensor:
    """(values - mean) / std of the global batch, of the shape of values; zero where that has no spread."""
    if batch.std == 0.0:
        return torch.zeros_like(values)
    return ((values.double() - batch.mean) / batch.std).to(values.dtype)
