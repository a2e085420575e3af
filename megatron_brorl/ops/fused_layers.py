"""The parts of a layer that is trained, on CPUs, in float32, bfloat16 and float64: matrix products by csrc/gemm.*, and
what stands between them by csrc/layer_ops.*: one pass over memory forward, one backward, and little kept in between.

Importing this file loads the extension. Raises ValueError or TypeError for tensors that do not fit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_brorl.ops import native  # noqa: F401  loads the ops
from megatron_brorl.ops.reference import compute_dtype
from megatron_brorl.ops.softmax import gemm_

WIDE = 16  # heads of a multiple of it are what attention takes; others are filled up with zeros


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] weight [N, K]^T + bias [N]. Products that end in bfloat16 are torch's own.

    Where weight has a main_grad (Megatron's sum over micro-batches), its gradient is added there, and weight.grad only
    says so, as with Megatron's gradient_accumulation_fusion.
    """
    out: Tensor = _Linear.apply(x, weight, bias)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] / rms(x) * weight [H], as torch.nn.functional.rms_norm."""
    out: Tensor = _RmsNorm.apply(x.reshape(-1, x.shape[-1]).contiguous(), weight, eps)
    return out.view_as(x)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[..., 2 F] -> [..., F]: silu of the first half times the second (Shazeer 2020, SwiGLU)."""
    out: Tensor = _SiluMul.apply(gate_up.reshape(-1, gate_up.shape[-1]).contiguous())
    return out.view(*gate_up.shape[:-1], -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """ops.rope.rotate of x [T, heads, d] by the angles whose cos and sin [T, d / 2] are given, without gradient.

    cos and sin are float32, for float64 x float64.
    """
    out: Tensor = _Rotate.apply(x, cos, sin)
    return out


def attend(query: Tensor, key: Tensor, value: Tensor, segments: Tensor, scale: float) -> Tensor:
    """Attention over a packed stream in float32: query [T, heads, d], key and value [T, kv_heads, d] -> [T, heads, d].

    segments [S, 4] int64 cover the stream in order: first token, tokens, the same of the prefix (no tokens: none).
    A token attends to its segment up to itself and to all of the prefix, an earlier segment without a prefix.
    """
    width = query.shape[-1]
    if missing := -width % WIDE:
        query, key, value = (torch.nn.functional.pad(x, (0, missing)) for x in (query, key, value))
    out: Tensor = _SegmentAttention.apply(
        *(x.contiguous() if x.stride(-1) != 1 else x for x in (query, key, value)), segments, scale
    )
    return out[..., :width]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if bias is None:
            out = _product(rows, weight.t())
        elif x.dtype == torch.bfloat16:
            out = torch.addmm(bias, rows, weight.t())
        else:
            out = bias.repeat(len(rows), 1)
            gemm_(out, rows, weight.t(), accumulate=True)
        ctx.save_for_backward(rows, weight)
        ctx.bias = bias
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        gradient = upstream[0].reshape(len(rows), -1)
        of_x = _product(gradient, weight)
        if hasattr(weight, "main_grad"):
            gemm_(weight.main_grad, gradient.t(), rows, accumulate=True)
            weight.grad_added_to_main_grad = True
            of_weight = torch.empty_like(weight)  # never read
        else:
            of_weight = _product(gradient.t(), rows)
        of_bias = None if ctx.bias is None else gradient.sum(dim=0)
        return of_x.view(*upstream[0].shape[:-1], -1), of_weight, of_bias


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
        return (*torch.ops.brorl.rms_norm_gradient(upstream[0].contiguous(), *ctx.saved_tensors), None)


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return torch.ops.brorl.silu_mul(gate_up)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        return torch.ops.brorl.silu_mul_gradient(upstream[0].contiguous(), *ctx.saved_tensors)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return torch.ops.brorl.rotate(x, cos, sin, False)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        return torch.ops.brorl.rotate(upstream[0], *ctx.saved_tensors, True), None, None


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Tensor, scale: float) -> Tensor:
        out, log_sums = torch.ops.brorl.segment_attention(query, key, value, segments, scale)
        ctx.save_for_backward(query, key, value, out, log_sums, segments)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients = torch.ops.brorl.segment_attention_gradient(upstream[0].contiguous(), *ctx.saved_tensors, ctx.scale)
        return (*gradients, None, None)


@torch.library.register_fake("brorl::rms_norm")
def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(len(x), dtype=compute_dtype(x.dtype))


@torch.library.register_fake("brorl::rms_norm_gradient")
def _rms_norm_gradient_fake(gradient: Tensor, x: Tensor, weight: Tensor, inverse_rms: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


@torch.library.register_fake("brorl::silu_mul")
def _silu_mul_fake(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)


@torch.library.register_fake("brorl::silu_mul_gradient")
def _silu_mul_gradient_fake(gradient: Tensor, gate_up: Tensor) -> Tensor:
    return torch.empty_like(gate_up)


@torch.library.register_fake("brorl::rotate")
def _rotate_fake(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("brorl::segment_attention")
def _segment_attention_fake(
    query: Tensor, key: Tensor, value: Tensor, segments: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:2])


@torch.library.register_fake("brorl::segment_attention_gradient")
def _segment_attention_gradient_fake(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sums: Tensor,
    segments: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), key.new_empty(key.shape)
