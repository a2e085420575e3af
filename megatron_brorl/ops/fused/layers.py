"""The parts of a layer that is trained, on CPUs, in float32, bfloat16 and float64: matrix products (csrc/cpu/gemm.*)
and what stands between them (csrc/cpu/layer_ops.*, segment_attention.*): one pass over memory forward, one backward,
and little kept in between.

Importing this file loads the extension. Raises ValueError or TypeError for tensors that do not fit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from megatron_brorl.ops.fused import native  # noqa: F401  loads the ops
from megatron_brorl.ops.fused.softmax import gemm_

WIDE = 16  # heads of a multiple of it are what attention takes; others are filled up with zeros


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] weight [N, K]^T + bias [N]. Products that end in bfloat16 are torch's own.

    Where weight has a main_grad (Megatron's sum over micro-batches), its gradient is added there, and weight.grad only
    says so, as with Megatron's gradient_accumulation_fusion.
    """
    out: Tensor = _Linear.apply(x, weight, bias)
    return out


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """linear of rms_norm(x, norm [K], eps), which is computed again in the backward pass instead of being kept."""
    out: Tensor = _NormLinear.apply(x, norm, eps, weight, bias)
    return out


def swiglu_linear(gate_up: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up [..., K] of gate_up [..., 2 K] (Shazeer 2020, SwiGLU) times weight [N, K]^T.

    The first product is computed again in the backward pass instead of being kept; the gradient of gate_up takes the
    place of gate_up, which nothing else may need then.
    """
    out: Tensor = _SwiGluLinear.apply(gate_up, weight)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] / rms(x) * weight [H], as torch.nn.functional.rms_norm."""
    out: Tensor = _RmsNorm.apply(x.reshape(-1, x.shape[-1]).contiguous(), weight, eps)
    return out.view_as(x)


def attend(qkv: Tensor, cos: Tensor, sin: Tensor, segments: Tensor, scale: float) -> Tensor:
    """Attention over a packed stream in float32: qkv [T, kv_heads, heads + 2, d] -> [T, kv_heads * heads * d].

    For each kv head qkv has the queries that share its key, the key and the value. Queries and keys are turned as by
    ops.rope.rotate, by the angles whose cos and sin [T, d / 2] are given, in place: nothing else may need qkv then.
    segments [S, 4] int64 cover the stream in order: first token, tokens, the same of the prefix (no tokens: none).
    A token attends to its segment up to itself and to all of the prefix, an earlier segment without a prefix.
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
        normed = _product(gradient, weight)  # its gradient; the next line makes it the normed rows
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
        gated = _product(gradient, weight)  # its gradient; the next line makes it silu(gate) * up
        torch.ops.brorl.silu_mul_gradient_(gated, rows)
        increment_version(rows)  # a second backward pass fails
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
        gradient = upstream[0].contiguous().clone()  # The op writes over it.
        return (*torch.ops.brorl.rms_norm_gradient_(gradient, *ctx.saved_tensors), None)


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, segments: Tensor, scale: float) -> Tensor:
        torch.ops.brorl.rotate_(qkv[:, :, :-1], cos, sin, False)
        increment_version(qkv)  # whoever kept it for a backward pass of its own is told
        out, log_sums = torch.ops.brorl.segment_attention(qkv, segments, scale)
        # Detached, because qkv may be a view of a product of _Linear or _NormLinear. Unpacking a saved input asks for
        # its grad_fn, which autograd refuses for such a view once its memory has been written.
        ctx.save_for_backward(qkv.detach(), out, log_sums, segments, cos, sin)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        *saved, cos, sin = ctx.saved_tensors
        of_qkv = torch.ops.brorl.segment_attention_gradient(upstream[0].contiguous(), *saved, ctx.scale)
        torch.ops.brorl.rotate_(of_qkv[:, :, :-1], cos, sin, True)
        return of_qkv, None, None, None, None
