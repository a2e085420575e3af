"""The fused ops of csrc/ with types: the same arguments, results and meaning as reference.py, without [R, V] logits.

Importing this file loads the extension and completes its registration with torch.library. CPU only so far. The
vocabulary must be whole: under tensor parallelism the caller takes parallel/vocab.py instead, by its own explicit
choice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_brorl.algo.loss import MAXIMA, SUMS
from megatron_brorl.ops.native import check_devices
from megatron_brorl.ops.reference import LinearPpoLoss, compute_dtype


def linear_ppo_loss(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    old_log_probs: Tensor | None,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    divisor: float,
    eps_low: float,
    eps_high: float,
    is_cap: float,
    temperature: float,
) -> LinearPpoLoss:
    """As reference.linear_ppo_loss, with three matrix products in all and one chunk of logits held at a time.

    hidden [R, H] and weight [V, H] (no padding rows) are both float32, bfloat16 or float64; products accumulate in at
    least float32. ids [R] int64; old_log_probs (or None), rollout_log_probs and advantages [R] in float32 (float64 for
    float64 matrices). The gradients are found on the way forward and only scaled on the way back, in place: a second
    backward pass through one result raises RuntimeError. Raises ValueError for a shape or device, TypeError for a
    dtype, IndexError for an id outside the vocabulary.
    """
    vectors = (ids, rollout_log_probs, advantages, *(() if old_log_probs is None else (old_log_probs,)))
    check_devices("linear_ppo_loss", hidden, weight, *vectors)
    recording = torch.is_grad_enabled()
    loss, log_probs, entropy, counters = _LinearPpoLoss.apply(
        hidden,
        weight,
        ids,
        old_log_probs,
        rollout_log_probs,
        advantages,
        divisor,
        eps_low,
        eps_high,
        is_cap,
        temperature,
        recording and hidden.requires_grad,
        recording and weight.requires_grad,
    )
    values = counters.tolist()
    sums, maxima = values[: len(SUMS)], values[len(SUMS) :]
    return LinearPpoLoss(
        loss, log_probs, entropy, dict(zip(SUMS, sums, strict=True)), dict(zip(MAXIMA, maxima, strict=True))
    )


def linear_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """As reference.linear_log_probs, for the old and the reference policy: neither result carries a gradient.

    Shapes, dtypes and errors as in linear_ppo_loss; the log-probabilities are bitwise those of linear_ppo_loss on the
    same rows and threads.
    """
    check_devices("linear_log_probs", hidden, weight, ids)
    with torch.no_grad():
        log_probs, entropy = torch.ops.brorl.linear_log_probs(hidden, weight, ids, temperature)
    return log_probs, entropy


@torch.library.register_fake("brorl::linear_ppo_loss")
def _linear_ppo_loss_fake(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    old_log_probs: Tensor | None,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    divisor: float,
    eps_low: float,
    eps_high: float,
    is_cap: float,
    temperature: float,
    hidden_gradient: bool,
    weight_gradient: bool,
) -> tuple[Tensor, ...]:
    compute = compute_dtype(hidden.dtype)
    rows = hidden.shape[0]
    return (
        hidden.new_empty((), dtype=compute),
        hidden.new_empty(rows, dtype=compute),
        hidden.new_empty(rows, dtype=compute),
        hidden.new_empty(len(SUMS) + len(MAXIMA), dtype=torch.float64),
        hidden.new_empty(hidden.shape if hidden_gradient else (0,)),
        weight.new_empty(weight.shape if weight_gradient else (0,)),
    )


@torch.library.register_fake("brorl::linear_log_probs")
def _linear_log_probs_fake(hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    compute = compute_dtype(hidden.dtype)
    return hidden.new_empty(hidden.shape[0], dtype=compute), hidden.new_empty(hidden.shape[0], dtype=compute)


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[-2:])
    ctx.asked = inputs[-2:]


def _scaled_gradients(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    for needed, asked in zip(ctx.needs_input_grad[:2], ctx.asked, strict=True):
        if needed and not asked:
            raise RuntimeError("linear_ppo_loss: a gradient is needed that the forward pass was told not to find")
    if upstream is None:
        return (None,) * _ARGUMENTS
    grads = (g * upstream if asked else None for g, asked in zip(ctx.saved_tensors, ctx.asked, strict=True))
    return (*grads, *(None,) * (_ARGUMENTS - 2))


# For torch.compile, gradcheck and whoever else calls torch.ops.brorl.linear_ppo_loss itself.
torch.library.register_autograd("brorl::linear_ppo_loss", _scaled_gradients, setup_context=_save_gradients)
_ARGUMENTS = 13


class _LinearPpoLoss(torch.autograd.Function):
    """The same, but it gives its gradients away: autograd takes them over instead of copying [V, H] twice."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        *results, grad_hidden, grad_weight = torch.ops.brorl.linear_ppo_loss(*inputs)
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)
        # Not save_for_backward, which would keep a reference.
        ctx.gradients = [g if asked else None for g, asked in zip((grad_hidden, grad_weight), inputs[-2:], strict=True)]
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("linear_ppo_loss: its gradients are spent; one result allows one backward pass")
        scale = upstream[0]
        grads = (None if g is None or scale is None else g.mul_(scale) for g in gradients)
        return (*grads, *(None,) * (_ARGUMENTS - 2))
