"""GAE, group advantages, moments and whitening by csrc/policy/advantages.*.

The ops take float32 or float64 tensors on one device: the CPU, or CUDA if the extension was built for it. None of them
is differentiable. Results do not depend on the number of CPU threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_brorl.algo.advantages import Moments
from megatron_brorl.ops.fused.native import check_devices
from megatron_brorl.ops.reference.advantages import GroupKind, check_kind


def gae(rewards: Tensor, values: Tensor, starts: Tensor, gamma: float = 1.0, lam: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return (advantages [T], returns [T]) as ops.reference.advantages.gae does, with sums in float64."""
    check_devices("gae", rewards, values, starts)
    with torch.no_grad():
        return torch.ops.brorl.gae(rewards, values, starts, gamma, lam)


def group_advantages(rewards: Tensor, starts: Tensor, kind: GroupKind = "mean") -> Tensor:
    """Return advantages [B] as ops.reference.advantages.group_advantages does."""
    check_kind(kind)
    check_devices("group_advantages", rewards, starts)
    with torch.no_grad():
        return torch.ops.brorl.group_advantages(rewards, starts, kind == "mean_std")


def moments(values: Tensor, weights: Tensor | None = None) -> Moments:
    """Return the moments of a tensor of any shape, in float64. Waits for the device.

    weights: the shape and dtype of values. Elements of weight 0 are left out; other weights count once.
    """
    check_devices("moments", values, weights)
    with torch.no_grad():
        return Moments(*torch.ops.brorl.moments(values, weights).tolist())


def whiten(values: Tensor, batch: Moments) -> Tensor:
    """Replace values, contiguous and of any shape, by (values - mean) / std of the batch and return them.

    The result is 0 everywhere if the batch has no spread.
    """
    check_devices("whiten", values)
    if values.requires_grad:
        raise ValueError("whiten: values require a gradient, which this op does not give; detach them")
    torch.ops.brorl.whiten_(values, batch.mean, batch.std)
    return values
