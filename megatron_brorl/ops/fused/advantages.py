"""Advantages and whitening of csrc/policy/advantages.* and moments.* with types; none of them is differentiable.

Importing this file loads the extension and completes the registration of the ops. All of them take
float32 or float64 (TypeError otherwise) on one device: the CPU, or CUDA where the extension was built for it; and raise
ValueError for a shape, a device or a setting. Results are bitwise the same for any number of CPU threads and from run
to run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_brorl.algo.advantage import Moments
from megatron_brorl.ops.fused.native import check_devices
from megatron_brorl.ops.reference.advantages import GroupKind, check_kind


def gae(
    rewards: Tensor,
    values: Tensor,
    starts: Tensor,
    mask: Tensor | None = None,
    bootstrap: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """As ops.reference.advantages.gae, in one pass over memory and with sums in float64: (advantages [T], returns [T]).

    rewards and values [T], starts [S + 1] int64, mask [T] bool, bootstrap [S] in the dtype of rewards. out: where the
    results go, contiguous and in that dtype; it may be (rewards, values). Fresh memory costs about as much as the op.
    """
    advantages, returns = out or (torch.empty_like(rewards), torch.empty_like(rewards))
    check_devices("gae", rewards, values, starts, mask, bootstrap, advantages, returns)
    if advantages.requires_grad or returns.requires_grad:
        raise ValueError("gae: out requires a gradient, which this op does not give; detach it")
    torch.ops.brorl.gae_(rewards, values, starts, mask, bootstrap, gamma, lam, advantages, returns)
    return advantages, returns


def group_advantages(rewards: Tensor, starts: Tensor, mask: Tensor | None = None, kind: GroupKind = "mean") -> Tensor:
    """As ops.reference.advantages.group_advantages: [B] from rewards [B], starts [G + 1] int64 and mask [B] bool."""
    check_kind(kind)
    check_devices("group_advantages", rewards, starts, mask)
    with torch.no_grad():
        return torch.ops.brorl.group_advantages(rewards, starts, mask, kind == "mean_std")


def moments(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum of weights (count without any), mean and weighted sum of squared deviations: [3] float64 on values' device.

    values of any shape; weights of the same shape, in the dtype of values or bool, not negative. A weight of 0 leaves
    an element out, whatever it holds. Blocks of fixed size are reduced in two passes and merged pairwise (Chan et al.
    1983), so values far from zero keep their spread. Nothing at all gives zeros.
    """
    check_devices("moments", values, weights)
    with torch.no_grad():
        return torch.ops.brorl.moments(values, weights)


def to_moments(packed: Tensor) -> Moments:
    """What moments() gave, [3], as algo.advantage.merge takes it over micro-batches and ranks. Waits for the device."""
    if packed.shape != (3,):
        raise ValueError(f"to_moments: takes the [3] tensor that moments() gives, got {list(packed.shape)}")
    count, mean, m2 = packed.tolist()
    return Moments(count, mean, m2)


def whiten_(values: Tensor, mean: float, std: float, mask: Tensor | None = None) -> Tensor:
    """In place: (values - mean) / std where mask is true, else 0; everything 0 where std is 0. Returns values.

    values of any shape, contiguous and without requires_grad; mask bool of the same shape, None: all true. mean and std
    are those of the global batch (algo.advantage.whiten is the reference).
    """
    check_devices("whiten_", values, mask)
    if values.requires_grad:
        raise ValueError("whiten_: values require a gradient, which this op does not give; detach them")
    torch.ops.brorl.whiten_(values, mean, std, mask)
    return values


@torch.library.register_fake("brorl::gae_")
def _gae_fake(
    rewards: Tensor,
    values: Tensor,
    starts: Tensor,
    mask: Tensor | None,
    bootstrap: Tensor | None,
    gamma: float,
    lam: float,
    advantages: Tensor,
    returns: Tensor,
) -> None:
    return None


@torch.library.register_fake("brorl::group_advantages")
def _group_advantages_fake(rewards: Tensor, starts: Tensor, mask: Tensor | None, by_std: bool) -> Tensor:
    return rewards.new_empty(rewards.shape)


@torch.library.register_fake("brorl::moments")
def _moments_fake(values: Tensor, weights: Tensor | None) -> Tensor:
    return values.new_empty(3, dtype=torch.float64)


@torch.library.register_fake("brorl::whiten_")
def _whiten_fake(values: Tensor, mean: float, std: float, mask: Tensor | None) -> None:
    return None
