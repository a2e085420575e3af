"""Norm, activation and rotation of a layer that is trained, against float64 from their formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_brorl.ops import fused_layers as ops
from megatron_brorl.ops import native

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float64: 1e-12}
EPS = 1e-5


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up


def turn(x: Tensor, angle: Tensor) -> Tensor:
    """Pairs (i, i + d / 2) as complex numbers."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle).unsqueeze(1)
    return torch.cat((turned.real, turned.imag), dim=-1)


def close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Within the dtype's precision of the largest entry."""
    assert got.dtype == dtype
    error = (got.detach().double() - expected.detach()).abs().max()
    assert error <= TOLERANCE[dtype] * max(float(expected.detach().abs().max()), 1e-3), error


def compare(
    op: Callable[..., Tensor],
    formula: Callable[..., Tensor],
    inputs: list[Tensor],
    upstream: Tensor,
    dtype: torch.dtype,
) -> None:
    """Result and gradients of op against those of the formula in float64, from the same rounded inputs."""
    narrow = [x.to(dtype).requires_grad_() for x in inputs]
    wide = [x.detach().double().requires_grad_() for x in narrow]
    up = upstream.to(dtype)
    got, expected = op(*narrow), formula(*wide)
    close(got, expected, dtype)
    for mine, right in zip(
        torch.autograd.grad(got, narrow, up), torch.autograd.grad(expected, wide, up.double()), strict=True
    ):
        close(mine, right, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 40), (700, 3, 64), (0, 16)])
def test_rms_norm(shape, dtype):
    g = torch.Generator().manual_seed(sum(shape))
    x, up = torch.randn(*shape, generator=g) * 30, torch.randn(*shape, generator=g)
    weight = torch.rand(shape[-1], generator=g) + 0.5
    if not x.numel():
        out, of_weight = torch.ops.brorl.rms_norm_gradient(x, x, weight, torch.zeros(0))
        assert out.shape == x.shape
        assert torch.equal(of_weight, torch.zeros(shape[-1]))
        return
    compare(lambda x, w: ops.rms_norm(x, w, EPS), norm, [x, weight], up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 5, 38), (300, 128)])
def test_silu_mul(shape, dtype):
    g = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(*shape, generator=g) * torch.tensor([0.1, 10.0]).repeat(shape[-1] // 2)
    compare(ops.silu_mul, swiglu, [x], torch.randn(*shape[:-1], shape[-1] // 2, generator=g), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "width"), [((5, 3), 4), ((1, 1, 6), 4), ((70, 1, 130), 65), ((2, 900), 33)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(shape, width, with_bias, dtype):
    g = torch.Generator().manual_seed(width)
    x, weight, bias = (torch.randn(*s, generator=g) for s in (shape, (width, shape[-1]), (width,)))
    up = torch.randn(*shape[:-1], width, generator=g)
    if with_bias:
        before = bias.clone()
        compare(ops.linear, lambda x, w, b: x @ w.t() + b, [x, weight, bias], up, dtype)
        ops.linear(x, weight, bias)
        assert torch.equal(bias, before)
    else:
        compare(lambda x, w: ops.linear(x, w, None), lambda x, w: x @ w.t(), [x, weight], up, dtype)


@pytest.mark.skipif(not native.BFLOAT16_KERNEL, reason="this processor has no bfloat16 kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_adds_to_the_main_gradient(dtype):
    """Over two micro-batches, on top of what is there, in float32."""
    g = torch.Generator().manual_seed(6)
    weight: Any = torch.nn.Parameter(torch.randn(40, 24, generator=g).to(dtype))
    weight.main_grad = start = torch.randn(40, 24, generator=g)
    expected = start.double()
    for _ in range(2):
        x, up = (torch.randn(50, n, generator=g).to(dtype) for n in (24, 40))
        weight.grad_added_to_main_grad = False
        ops.linear(x.requires_grad_(), weight, None).backward(up)
        assert weight.grad_added_to_main_grad
        expected = expected + up.double().t() @ x.detach().double()
    # Products of bfloat16 are exact in float32, so the sum is as good in both dtypes.
    close(weight.main_grad, expected, torch.float32)


def test_views_that_are_not_contiguous():
    """A key, for instance, is a slice of the projection."""
    x = torch.randn(6, 3, 8, generator=torch.Generator().manual_seed(5))
    weight = torch.rand(4)
    close(ops.rms_norm(x[:, 1, :4], weight, EPS), norm(x[:, 1, :4].double(), weight.double()), torch.float32)
    close(ops.silu_mul(x[:, 1:]), swiglu(x[:, 1:].double()), torch.float32)
    close(ops.silu_mul(x.transpose(0, 1)), swiglu(x.transpose(0, 1).double()), torch.float32)


def test_silu_mul_of_extreme_gates():
    gate = torch.tensor([-1e4, -200.0, -88.0, 0.0, 88.0, 200.0, 1e4])
    x = torch.cat((gate, torch.full((7,), 2.0))).unsqueeze(0).requires_grad_()
    out = ops.silu_mul(x)
    assert torch.allclose(out, torch.tensor([[0.0, 0.0, 0.0, 0.0, 176.0, 400.0, 2e4]]))
    out.sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad[0, :7], torch.tensor([0.0, 0.0, 0.0, 1.0, 2.0, 2.0, 2.0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 1, 2), (9, 3, 10), (200, 4, 64)])
def test_rotate(tokens, heads, dim, dtype):
    """Also of a view into a projection, as Megatron hands it over."""
    g = torch.Generator().manual_seed(dim)
    angle = torch.rand(tokens, dim // 2, generator=g).double() * 100
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    projected, up = (torch.randn(tokens, heads + 2, dim, generator=g) for _ in range(2))
    cos, sin = angle.cos().to(wide), angle.sin().to(wide)
    compare(
        lambda x: ops.rotate(x[:, 1:-1], cos, sin), lambda x: turn(x[:, 1:-1], angle), [projected], up[:, 1:-1], dtype
    )


def test_gradients_by_finite_differences():
    g = torch.Generator().manual_seed(2)
    x, w = (torch.randn(*s, generator=g).double().requires_grad_() for s in ((4, 6), (6,)))
    angle = torch.rand(4, 3, generator=g).double()
    assert torch.autograd.gradcheck(lambda x, w: ops.rms_norm(x, w, EPS), (x, w))
    assert torch.autograd.gradcheck(ops.silu_mul, (x,))
    assert torch.autograd.gradcheck(lambda x: ops.rotate(x.view(4, 1, 6), angle.cos(), angle.sin()), (x,))


def test_results_do_not_depend_on_threads():
    g = torch.Generator().manual_seed(3)
    x, up = torch.randn(2, 1500, 64, generator=g)
    weight, before, found = torch.rand(64, generator=g), torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        out, inverse = torch.ops.brorl.rms_norm(x, weight, EPS)
        found.append((out, *torch.ops.brorl.rms_norm_gradient(up, x, weight, inverse)))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x, weight, c = torch.randn(3, 20).to(dtype), torch.randn(20).to(dtype), torch.randn(3, 2, dtype=wide)
    b = torch.ops.brorl
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (b.rms_norm, (x, weight, EPS)),
        (b.rms_norm_gradient, (x, x.clone(), weight, torch.rand(3, dtype=wide))),
        (b.silu_mul, (x,)),
        (b.silu_mul_gradient, (x[:, :10].contiguous(), x)),
        (b.rotate, (x.view(3, 5, 4), c, c.clone(), True)),
    ]
    for op, arguments in calls:
        torch.library.opcheck(op.default, arguments)


X = torch.ones(3, 4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda b: b.rms_norm(X, torch.ones(5), EPS), ValueError, r"weight must be \[4\], got \[5\]"),
        (lambda b: b.rms_norm(X, torch.ones(4).double(), EPS), TypeError, "weight must be Float, got Double"),
        (
            lambda b: b.rms_norm(X.half(), torch.ones(4).half(), EPS),
            TypeError,
            "x must be float32, bfloat16 or float64",
        ),
        (lambda b: b.rms_norm(X.t(), torch.ones(3), EPS), ValueError, "x must be contiguous"),
        (lambda b: b.silu_mul(torch.ones(3, 5)), ValueError, r"gate_up must be \[R, 2 F\], got \[3, 5\]"),
        (lambda b: b.silu_mul_gradient(X, X), ValueError, r"gate_up must be \[3, 8\], got \[3, 4\]"),
        (lambda b: b.rotate(torch.ones(3, 1, 5), X, X, False), ValueError, r"x must be \[T, heads, d\], d even"),
        (
            lambda b: b.rotate(torch.ones(3, 1, 8), X[:2], X[:2], False),
            ValueError,
            r"cos must be \[3, 4\], got \[2, 4\]",
        ),
    ],
)
def test_mistakes(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.ops.brorl)
