"""The ops of csrc/. Importing this module loads the extension.

The functions here, by csrc/policy/{advantages,value_loss}.*, take float32 or float64 tensors on one device: the CPU, or
CUDA if the extension was built for it. Only value_loss is differentiable. Results do not depend on CPU threads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_brorl.algo.advantages import Moments
from megatron_brorl.errors import UserError
from megatron_brorl.ops.fused import decode, linear, native
from megatron_brorl.ops.fused.native import check_devices
from megatron_brorl.ops.interface import ValueLoss
from megatron_brorl.ops.reference.decode import DecodeOps


def gae(rewards: Tensor, values: Tensor, starts: Tensor, gamma: float = 1.0, lam: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return (advantages [T], returns [T]) as ops.reference.advantages.gae does, with sums in float64."""
    check_devices("gae", rewards, values, starts)
    with torch.no_grad():
        return torch.ops.brorl.gae(rewards, values, starts, gamma, lam)


def moments(values: Tensor, weights: Tensor | None = None) -> Moments:
    """Return the moments of a tensor of any shape, in float64. Waits for the device.

    weights: the shape and dtype of values. Elements of weight 0 are left out; other weights count once.
    """
    check_devices("moments", values, weights)
    with torch.no_grad():
        return Moments(*torch.ops.brorl.moments(values, weights).tolist())


def whiten(values: Tensor, batch: Moments) -> Tensor:
    """Replace values, contiguous and of any shape, by (values - mean) / std of the batch and return them.

    The result is 0 if the batch has no spread.
    """
    check_devices("whiten", values)
    if values.requires_grad:
        raise ValueError("whiten: values require a gradient, but this op has none; detach them")
    torch.ops.brorl.whiten_(values, batch.mean, batch.std)
    return values


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, clip: float) -> ValueLoss:
    """Return what ops.reference.advantages.value_loss returns, differentiable once, and only by `values`.

    All tensors are [R].
    """
    check_devices("value_loss", values, old_values, returns, weights)
    loss, sums = _ValueLoss.apply(values, old_values, returns, weights, clip)
    count, return_mean, return_m2, residual_mean, residual_m2, loss_value, clipped = sums.tolist()
    metrics = {"loss": loss_value, "clipped": clipped, "tokens": count}
    return ValueLoss(loss, metrics, Moments(count, return_mean, return_m2), Moments(count, residual_mean, residual_m2))


class _ValueLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, clip: float
    ) -> tuple[Tensor, Tensor]:
        gradient, sums = torch.ops.brorl.value_loss(values, old_values, returns, weights, clip)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(sums)
        return sums[5].to(values.dtype), sums  # sums[5]: the loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream, None, None, None, None


class FusedBackend:
    """The ops of csrc/. csrc has decoding and sampling for CPUs only, so a GPU uses torch's kernels for them."""

    linear_log_probs = staticmethod(linear.linear_log_probs)
    linear_ppo_loss = staticmethod(linear.linear_ppo_loss)
    linear_logits = staticmethod(linear.linear_logits)
    value_loss = staticmethod(value_loss)
    gae = staticmethod(gae)
    moments = staticmethod(moments)
    whiten = staticmethod(whiten)

    def __init__(self, device: torch.device) -> None:
        """Raise UserError if csrc was not built for the device."""
        on_cpu = device.type == "cpu"
        if not on_cpu and not native.CUDA:
            raise UserError(
                'ops.implementation = "fused": the extension was built without CUDA kernels; install again with '
                'BRORL_CUDA=1 and CUDA_HOME set, or set it to "reference"'
            )
        self.fused_layers = on_cpu
        self.decode: DecodeOps = decode.FusedDecode() if on_cpu else decode.FlashDecode()
        self.sample_tokens = decode.sample_tokens if on_cpu else decode.sample_tokens_on_gpu
