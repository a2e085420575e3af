"""The critic's loss by csrc/policy/value_loss.*: one pass that gives the loss and the gradient of each token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_brorl.ops.fused.advantages import moments
from megatron_brorl.ops.fused.native import check_devices
from megatron_brorl.ops.reference.value import ValueLoss


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, clip: float) -> ValueLoss:
    """Return what ops.reference.value.value_loss returns, differentiable once and in values only.

    All tensors are [R], float32 or float64, on one device (CPU, or CUDA if the extension was built for it).
    """
    check_devices("value_loss", values, old_values, returns, weights)
    losses, clipped = _ValueLoss.apply(values, old_values, returns, weights, clip)
    loss = losses.sum()
    of_returns, of_residuals = moments(returns, weights), moments(returns - values.detach(), weights)
    sums = {"loss": float(loss.detach()), "clipped": float(clipped.sum()), "tokens": of_returns.count}
    return ValueLoss(loss, sums, of_returns, of_residuals)


class _ValueLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, clip: float
    ) -> tuple[Tensor, Tensor]:
        losses, gradient, clipped = torch.ops.brorl.value_loss(values, old_values, returns, weights, clip)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(clipped)
        return losses, clipped

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream, None, None, None, None
