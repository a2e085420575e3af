"""The critic's loss of csrc/policy/value_loss.cpp and .cu with types: ops.reference.value in one pass over memory.

Importing this file loads the extension and completes the registration of the op.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_brorl.algo.advantage import Moments
from megatron_brorl.ops.fused.native import check_devices
from megatron_brorl.ops.reference.value import ValueLoss

_SUMS = 8  # the fields of ValueSums in csrc/policy/value_loss_math.h


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, clip: float) -> ValueLoss:
    """As ops.reference.value.value_loss; the gradient of values is found on the way forward and scaled on the way back.

    All tensors are [R], float32 or float64, on one device (CPU, or CUDA where the extension was built for it). The
    results are bitwise the same for any number of CPU threads and from run to run. Second derivatives are refused.
    Raises ValueError for a shape, a device or a negative clip, TypeError for a dtype.
    """
    check_devices("value_loss", values, old_values, returns, weights)
    loss, sums, _ = torch.ops.brorl.value_loss(values, old_values, returns, weights, clip)
    total, clipped, *moments = sums.tolist()
    of_returns, of_residuals = Moments(*moments[:3]), Moments(*moments[3:])
    counts = {"loss": total, "clipped": clipped, "tokens": of_returns.count}
    return ValueLoss(loss, counts, of_returns, of_residuals)


@torch.library.register_fake("brorl::value_loss")
def _value_loss_fake(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, clip: float
) -> tuple[Tensor, Tensor, Tensor]:
    sums = values.new_empty(_SUMS, dtype=torch.float64)
    return values.new_empty(()), sums, values.new_empty(values.shape)


def _save_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, sums, gradient = output
    ctx.mark_non_differentiable(sums, gradient)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(gradient)


@once_differentiable
def _scaled_gradient(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if any(ctx.needs_input_grad[1:]):
        raise RuntimeError("value_loss: only values have a gradient; detach old_values, returns and weights")
    (gradient,) = ctx.saved_tensors
    return (None if upstream is None else gradient * upstream, None, None, None, None)


torch.library.register_autograd("brorl::value_loss", _scaled_gradient, setup_context=_save_gradient)
