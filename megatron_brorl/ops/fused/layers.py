"""Ops of trained layers on CPUs, in float32, bfloat16 and float64: matrix products (csrc/common/gemm.*), norms,
activations and attention (csrc/cpu/layer_ops.*, segment_attention.*).

The ops between two products make one pass over memory forward and one backward, and keep little in between. Importing
this module loads the extension. Wrong shapes raise ValueError, wrong dtypes TypeError.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from megatron_brorl.ops.fused import native  # noqa: F401  loads the ops
from megatron_brorl.ops.fused.softmax import gemm_

HEAD_SIZE_MULTIPLE = 16  # attention needs a multiple of it as head size; others are padded with zeros


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return x [..., K] weight [N, K]^T + bias [N] and, for adapters, x a [R, K]^T. torch computes bfloat16.

    If weight has a main_grad (Megatron's sum over micro-batches), its gradient is added there and weight.grad is a
    placeholder, as with Megatron's gradient_accumulation_fusion. A frozen weight or bias gets no gradient.
    """
    return _Linear.apply(x, weight, bias, a)


def norm_linear(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, a: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return linear of rms_norm(x, norm [K], eps). The backward pass recomputes the norm instead of storing it."""
    return _NormLinear.apply(x, norm, eps, weight, bias, a)


def swiglu_linear(gate_up: Tensor, weight: Tensor, a: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return linear of silu(gate) * up [..., K] of gate_up [..., 2 K] (Shazeer 2020, SwiGLU), without bias.

    The backward pass recomputes silu(gate) * up instead of storing it, and overwrites gate_up by its gradient. No other
    function may need gate_up for its own backward pass.
    """
    return _SwiGluLinear.apply(gate_up, weight, a)


def add_product(out: Tensor, down: Tensor, b: Tensor) -> Tensor:
    """Add down [..., R] b [N, R]^T to out [..., N], in place, and return it.

    No other function may need out, which must be contiguous, for its own backward pass.
    """
    return _AddProduct.apply(out, down, b)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x [..., H] / rms(x) * weight [H], as torch.nn.functional.rms_norm."""
    out: Tensor = _RmsNorm.apply(x.reshape(-1, x.shape[-1]).contiguous(), weight, eps)
    return out.view_as(x)


def attend(qkv: Tensor, cos: Tensor, sin: Tensor, segments: Tensor, scale: float) -> Tensor:
    """Attend over a packed stream in float32: qkv [T, kv_heads, queries + 2, d] -> [T, kv_heads * queries * d].

    For each kv head qkv has the queries that share its key, the key and the value. Queries and keys are rotated in
    place as by ops.rope.rotate, with cos and sin [T, d / 2], so no other function may need qkv. segments [S, 4] int64
    cover the stream in order: first token and length, and those of the prefix (length 0: none). A token attends to its
    segment up to itself and to all of the prefix, which is an earlier segment without a prefix.
    """
    width = qkv.shape[-1]
    if missing := -width % HEAD_SIZE_MULTIPLE:
        qkv = torch.nn.functional.pad(qkv, (0, missing))
    out: Tensor = _SegmentAttention.apply(qkv, cos, sin, segments, scale)
    return out[..., :width].flatten(1)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows, weight, bias, a)
        return _affine(rows, weight, bias, x), _down(rows, a, x)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, bias, a = ctx.saved_tensors
        gradient, down_grad = _flat(upstream[0]), _flat(upstream[1])
        x_grad = _like(_rows_grad(gradient, weight, down_grad, a), upstream[0])
        return x_grad, _weight_grad(weight, gradient, rows), _bias_grad(bias, gradient), _a_grad(down_grad, rows)


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, a: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        normed, inverse_rms = torch.ops.brorl.rms_norm(rows, norm, eps)
        ctx.save_for_backward(rows, norm, inverse_rms, weight, bias, a)
        return _affine(normed, weight, bias, x), _down(normed, a, x)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, norm, inverse_rms, weight, bias, a = ctx.saved_tensors
        gradient, down_grad = _flat(upstream[0]), _flat(upstream[1])
        normed_grad = _rows_grad(gradient, weight, down_grad, a)
        x_grad, norm_grad = torch.ops.brorl.rms_norm_gradient_(normed_grad, rows, norm, inverse_rms)
        normed = normed_grad  # The op has overwritten the gradient by the normed rows.
        parameter_grads = _weight_grad(weight, gradient, normed), _bias_grad(bias, gradient), _a_grad(down_grad, normed)
        return _like(x_grad, upstream[0]), norm_grad, None, *parameter_grads


class _SwiGluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor, a: Tensor | None) -> tuple[Tensor, Tensor | None]:
        rows = gate_up.reshape(-1, gate_up.shape[-1]).contiguous()
        ctx.save_for_backward(rows, weight, a)
        gated = torch.ops.brorl.silu_mul(rows)
        return _affine(gated, weight, None, gate_up), _down(gated, a, gate_up)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, a = ctx.saved_tensors
        gradient, down_grad = _flat(upstream[0]), _flat(upstream[1])
        gated_grad = _rows_grad(gradient, weight, down_grad, a)
        torch.ops.brorl.silu_mul_gradient_(gated_grad, rows)
        gated = gated_grad  # The op has overwritten it by silu(gate) * up, and the rows by their gradient.
        increment_version(rows)  # makes a second backward pass fail
        return _like(rows, upstream[0]), _weight_grad(weight, gradient, gated), _a_grad(down_grad, gated)


class _AddProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, down: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(down, b)
        # autograd refuses to change a view that another function returned, as Megatron's reductions do on one rank.
        total = out.detach()
        _add_product(total.view(-1, out.shape[-1]), _flat(down), b.t())
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        down, b = ctx.saved_tensors
        gradient = _flat(upstream[0])
        return upstream[0], _like(_product(gradient, b), down), _product(gradient.t(), _flat(down))


def _affine(rows: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Return rows weight^T + bias in the shape of x, whose last dimension may differ."""
    if bias is None:
        return _like(_product(rows, weight.t()), x)
    if rows.dtype == torch.bfloat16:
        return _like(torch.addmm(bias, rows, weight.t()), x)
    out = bias.repeat(len(rows), 1)
    gemm_(out, rows, weight.t(), accumulate=True)
    return _like(out, x)


def _down(rows: Tensor, a: Tensor | None, x: Tensor) -> Tensor | None:
    """Return rows a^T in the shape of x, apart from its last dimension, or None without adapters."""
    return None if a is None else _like(_product(rows, a.t()), x)


def _rows_grad(gradient: Tensor, weight: Tensor, down_grad: Tensor | None, a: Tensor | None) -> Tensor:
    """Return the gradient of the rows that were multiplied by weight and by a."""
    out = _product(gradient, weight)
    if down_grad is not None and a is not None:
        _add_product(out, down_grad, a)
    return out


def _weight_grad(weight: Any, gradient: Tensor, rows: Tensor) -> Tensor | None:
    if not weight.requires_grad:
        return None
    if not hasattr(weight, "main_grad"):
        return _product(gradient.t(), rows)
    gemm_(weight.main_grad, gradient.t(), rows, accumulate=True)
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)  # never read


def _bias_grad(bias: Tensor | None, gradient: Tensor) -> Tensor | None:
    return None if bias is None or not bias.requires_grad else gradient.sum(dim=0)


def _a_grad(down_grad: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if down_grad is None else _product(down_grad.t(), rows)


def _product(left: Tensor, right: Tensor) -> Tensor:
    if left.dtype == torch.bfloat16:
        return left @ right
    out = left.new_empty(len(left), right.shape[1])
    gemm_(out, left, right, accumulate=False)
    return out


def _add_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to out."""
    if left.dtype == torch.bfloat16:
        out.addmm_(left, right)
    else:
        gemm_(out, left, right, accumulate=True)


def _flat(x: Any) -> Any:
    """[..., N] -> [T, N], contiguous. None, the gradient of a result that is None, stays None."""
    return None if x is None else x.reshape(-1, x.shape[-1]).contiguous()


def _like(rows: Tensor, x: Tensor) -> Tensor:
    """[T, N] -> [..., N], with the dimensions of x before its last."""
    return rows.view(*x.shape[:-1], rows.shape[-1])


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, inverse_rms = torch.ops.brorl.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse_rms)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient = upstream[0].contiguous().clone()  # the op overwrites it
        return (*torch.ops.brorl.rms_norm_gradient_(gradient, *ctx.saved_tensors), None)


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, segments: Tensor, scale: float) -> Tensor:
        torch.ops.brorl.rotate_(qkv[:, :, :-1], cos, sin, inverse=False)
        increment_version(qkv)  # makes the backward pass of a function that saved qkv fail
        out, log_sums = torch.ops.brorl.segment_attention(qkv, segments, scale)
        # qkv may be a view of a result of _Linear or _NormLinear. Unpacking a saved input asks for its grad_fn, which
        # autograd refuses for such a view after an in-place change. So save it detached.
        ctx.save_for_backward(qkv.detach(), out, log_sums, segments, cos, sin)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        *saved, cos, sin = ctx.saved_tensors
        qkv_grad = torch.ops.brorl.segment_attention_gradient(upstream[0].contiguous(), *saved, ctx.scale)
        torch.ops.brorl.rotate_(qkv_grad[:, :, :-1], cos, sin, inverse=True)
        return qkv_grad, None, None, None, None
