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

WIDE = 16  # attention needs a multiple of it as head size; others are padded with zeros


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [..., K] weight [N, K]^T + bias [N]. torch computes bfloat16 products.

    If weight has a main_grad (Megatron's sum over micro-batches), its gradient is added there and weight.grad is a
    placeholder, as with Megatron's gradient_accumulation_fusion.
    """
    out: Tensor = _Linear.apply(x, weight, bias)
    return out


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return linear of rms_norm(x, norm [K], eps). The backward pass recomputes the norm instead of storing it."""
    out: Tensor = _NormLinear.apply(x, norm, eps, weight, bias)
    return out


def swiglu_linear(gate_up: Tensor, weight: Tensor) -> Tensor:
    """Return silu(gate) * up [..., K] of gate_up [..., 2 K] (Shazeer 2020, SwiGLU) times weight [N, K]^T.

    The backward pass recomputes silu(gate) * up instead of storing it, and overwrites gate_up by its gradient. No other
    function may need gate_up for its own backward pass.
    """
    out: Tensor = _SwiGluLinear.apply(gate_up, weight)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x [..., H] / rms(x) * weight [H], as torch.nn.functional.rms_norm."""
    out: Tensor = _RmsNorm.apply(x.reshape(-1, x.shape[-1]).contiguous(), weight, eps)
    return out.view_as(x)


def attend(qkv: Tensor, cos: Tensor, sin: Tensor, segments: Tensor, scale: float) -> Tensor:
    """Attend over a packed stream in float32: qkv [T, kv_heads, heads + 2, d] -> [T, kv_heads * heads * d].

    For each kv head qkv has the queries that share its key, the key and the value. Queries and keys are rotated in
    place as by ops.rope.rotate, with cos and sin [T, d / 2], so no other function may need qkv. segments [S, 4] int64
    cover the stream in order: first token, length, and both of the prefix (length 0: none). A token attends to its
    segment up to itself and to all of the prefix, which is an earlier segment without a prefix.
    """
    width = qkv.shape[-1]
    if missing := -width % WIDE:
        qkv = torch.nn.functional.pad(qkv, (0, missing))
    out: Tensor = _SegmentAttention.apply(qkv, cos, sin, segments, scale)
    return out[..., :width].flatten(1)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows, weight)
        ctx.bias = bias
        return _affine(rows, weight, bias).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        gradient = upstream[0].reshape(len(rows), -1).contiguous()
        of_x = _product(gradient, weight)
        return of_x.view(*upstream[0].shape[:-1], -1), _of_weight(weight, gradient, rows), _of_bias(ctx.bias, gradient)


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        normed, inverse_rms = torch.ops.brorl.rms_norm(rows, norm, eps)
        ctx.save_for_backward(rows, norm, inverse_rms, weight)
        ctx.bias = bias
        return _affine(normed, weight, bias).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, norm, inverse_rms, weight = ctx.saved_tensors
        gradient = upstream[0].reshape(len(rows), -1).contiguous()
        normed = _product(gradient, weight)  # the gradient, which the next line overwrites by the normed rows
        of_x, of_norm = torch.ops.brorl.rms_norm_gradient_(normed, rows, norm, inverse_rms)
        of_weight = _of_weight(weight, gradient, normed)
        of_bias = _of_bias(ctx.bias, gradient)
        return of_x.view(*upstream[0].shape[:-1], -1), of_norm, None, of_weight, of_bias


class _SwiGluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor) -> Tensor:
        rows = gate_up.reshape(-1, gate_up.shape[-1]).contiguous()
        ctx.save_for_backward(rows, weight)
        return _product(torch.ops.brorl.silu_mul(rows), weight.t()).view(*gate_up.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        gradient = upstream[0].reshape(len(rows), -1).contiguous()
        gated = _product(gradient, weight)  # the gradient, which the next line overwrites by silu(gate) * up
        torch.ops.brorl.silu_mul_gradient_(gated, rows)
        increment_version(rows)  # makes a second backward pass fail
        return rows.view(*upstream[0].shape[:-1], -1), _of_weight(weight, gradient, gated)


def _affine(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return _product(rows, weight.t())
    if rows.dtype == torch.bfloat16:
        return torch.addmm(bias, rows, weight.t())
    out = bias.repeat(len(rows), 1)
    gemm_(out, rows, weight.t(), accumulate=True)
    return out


def _of_weight(weight: Any, gradient: Tensor, rows: Tensor) -> Tensor:
    if not hasattr(weight, "main_grad"):
        return _product(gradient.t(), rows)
    gemm_(weight.main_grad, gradient.t(), rows, accumulate=True)
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)  # never read


def _of_bias(bias: Tensor | None, gradient: Tensor) -> Tensor | None:
    return None if bias is None else gradient.sum(dim=0)


def _product(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype == torch.bfloat16:
        return a @ b
    out = a.new_empty(len(a), b.shape[1])
    gemm_(out, a, b, accumulate=False)
    return out


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
        torch.ops.brorl.rotate_(qkv[:, :, :-1], cos, sin, False)
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
        of_qkv = torch.ops.brorl.segment_attention_gradient(upstream[0].contiguous(), *saved, ctx.scale)
        torch.ops.brorl.rotate_(of_qkv[:, :, :-1], cos, sin, True)
        return of_qkv, None, None, None, None
