"""Products, norm, activation and rotation of trained layers against their formulas in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from threads import with_threads
from torch import Tensor

from megatron_brorl.ops.fused import layers as ops
from megatron_brorl.ops.fused import native

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float64: 1e-12}
EPS = 1e-5


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Rotate pairs (i, i + d / 2) as complex numbers."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle).unsqueeze(1)
    return torch.cat((turned.real, turned.imag), dim=-1)


def assert_close(result: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Check an error relative to the largest entry, within the dtype's precision."""
    assert result.dtype == dtype
    error = (result.detach().double() - expected.detach()).abs().max()
    assert error <= TOLERANCE[dtype] * max(float(expected.detach().abs().max()), 1e-3), error


def compare(
    op: Callable[..., Tensor],
    formula: Callable[..., Tensor],
    inputs: list[Tensor],
    upstream: Tensor,
    dtype: torch.dtype,
) -> None:
    """Compare result and gradients of op with those of the formula in float64, from the same rounded inputs."""
    rounded = [x.to(dtype).requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in rounded]
    grad_out = upstream.to(dtype)
    result, expected = op(*rounded), formula(*exact)
    assert_close(result, expected, dtype)
    for grad, expected_grad in zip(
        torch.autograd.grad(result, rounded, grad_out),
        torch.autograd.grad(expected, exact, grad_out.double()),
        strict=True,
    ):
        assert_close(grad, expected_grad, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 40), (700, 3, 64), (0, 16)])
def test_rms_norm(shape, dtype):
    g = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(*shape, generator=g) * 30
    grad_out = torch.randn(*shape, generator=g)
    weight = torch.rand(shape[-1], generator=g) + 0.5
    if not x.numel():
        inverse_rms = torch.zeros(0)  # of each row
        x_grad, grad_weight = torch.ops.brorl.rms_norm_gradient_(x.clone(), x, weight, inverse_rms=inverse_rms)
        assert x_grad.shape == x.shape
        assert torch.equal(grad_weight, torch.zeros(shape[-1]))
        return
    compare(lambda x, w: ops.rms_norm(x, w, EPS), norm, [x, weight], grad_out, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (15, 38), (300, 128), (0, 4)])
def test_silu_mul(shape, dtype):
    g = torch.Generator().manual_seed(sum(shape))
    x = (torch.randn(*shape, generator=g) * torch.tensor([0.1, 10.0]).repeat(shape[-1] // 2)).to(dtype)
    grad_out = torch.randn(shape[0], shape[1] // 2, generator=g).to(dtype)
    exact_x = x.double().requires_grad_()
    expected = swiglu(exact_x)
    (gradient,) = torch.autograd.grad(expected, exact_x, grad_out.double())
    out = torch.ops.brorl.silu_mul(x)
    grad_then_out = grad_out.clone()
    x_then_grad = x.clone()
    torch.ops.brorl.silu_mul_gradient_(grad_then_out, x_then_grad)
    assert torch.equal(grad_then_out, out)
    if x.numel():
        assert_close(out, expected, dtype)
        assert_close(x_then_grad, gradient, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "width"), [((5, 3), 4), ((1, 1, 6), 4), ((70, 1, 130), 65), ((2, 900), 33)])
def test_products_fused_with_a_norm_or_an_activation(shape, width, dtype):
    g = torch.Generator().manual_seed(width)
    x, norm_weight, bias = (torch.randn(*s, generator=g) for s in (shape, (shape[-1],), (width,)))
    weight = torch.randn(width, shape[-1], generator=g)
    grad_out = torch.randn(*shape[:-1], width, generator=g)
    compare(
        lambda x, n, w, b: ops.norm_linear(x, n, EPS, w, b)[0],
        lambda x, n, w, b: norm(x, n) @ w.t() + b,
        [x, norm_weight, weight, bias],
        grad_out,
        dtype,
    )
    if shape[-1] % 2 == 0:
        half = weight[:, : shape[-1] // 2].contiguous()
        compare(
            lambda x, w: ops.swiglu_linear(x.clone(), w)[0], lambda x, w: swiglu(x) @ w.t(), [x, half], grad_out, dtype
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "width"), [((5, 3), 4), ((1, 1, 6), 4), ((70, 1, 130), 65), ((2, 900), 33)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(shape, width, with_bias, dtype):
    g = torch.Generator().manual_seed(width)
    x, weight, bias = (torch.randn(*s, generator=g) for s in (shape, (width, shape[-1]), (width,)))
    grad_out = torch.randn(*shape[:-1], width, generator=g)
    if with_bias:
        before = bias.clone()
        compare(
            lambda *inputs: ops.linear(*inputs)[0], lambda x, w, b: x @ w.t() + b, [x, weight, bias], grad_out, dtype
        )
        ops.linear(x, weight, bias)
        assert torch.equal(bias, before)
    else:
        compare(lambda x, w: ops.linear(x, w, bias=None)[0], lambda x, w: x @ w.t(), [x, weight], grad_out, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("before", ["nothing", "norm", "activation"])
@pytest.mark.parametrize(("shape", "width", "rank"), [((5, 6), 4, 3), ((70, 1, 130), 65, 7), ((2, 900), 33, 48)])
def test_adapters_next_to_a_frozen_weight(shape, width, rank, before, dtype):
    g = torch.Generator().manual_seed(width)
    inputs = shape[-1] // 2 if before == "activation" else shape[-1]
    sizes = shape, (width, inputs), (width,), (inputs,), (rank, inputs), (width, rank)
    x, weight, bias, norm_weight, a, b = (torch.randn(*s, generator=g).to(dtype) for s in sizes)
    grad_out = torch.randn(*shape[:-1], width, generator=g)
    products = {
        "nothing": lambda x, a: ops.linear(x, weight, bias, a),
        "norm": lambda x, a: ops.norm_linear(x, norm_weight, EPS, weight, bias, a),
        "activation": lambda x, a: ops.swiglu_linear(x.clone(), weight, a),
    }[before]
    prepared = {"nothing": lambda x: x, "norm": lambda x: norm(x, norm_weight.double()), "activation": swiglu}[before]
    shift = 0.0 if before == "activation" else bias.double()

    def formula(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return prepared(x) @ weight.double().t() + prepared(x) @ a.t() @ b.t() + shift

    compare(lambda x, a, b: ops.add_product(*products(x, a), b), formula, [x, a, b], grad_out, dtype)


@pytest.mark.skipif(not native.BFLOAT16_KERNEL, reason="this processor has no bfloat16 kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("before", ["nothing", "norm", "activation"])
def test_products_add_to_the_main_gradient(before, dtype):
    """The sum over two micro-batches is in float32 and starts from a nonzero gradient."""
    g = torch.Generator().manual_seed(6)
    ones = torch.ones(24, dtype=dtype)
    product = {
        "nothing": lambda x, w: ops.linear(x, w, bias=None)[0],
        "norm": lambda x, w: ops.norm_linear(x, ones, EPS, w, bias=None)[0],
        "activation": lambda x, w: ops.swiglu_linear(x.clone(), w)[0],
    }[before]
    # Both sides round the operands to the dtype first.
    prepared = {
        "nothing": lambda x: x,
        "norm": lambda x: torch.ops.brorl.rms_norm(x, ones, EPS)[0],
        "activation": torch.ops.brorl.silu_mul,
    }[before]
    weight: Any = torch.nn.Parameter(torch.randn(40, 24, generator=g).to(dtype))
    weight.main_grad = torch.randn(40, 24, generator=g)
    expected = weight.main_grad.double()
    inputs = 48 if before == "activation" else 24
    for _micro_batch in range(2):
        x, grad_out = (torch.randn(50, n, generator=g).to(dtype) for n in (inputs, 40))
        weight.grad_added_to_main_grad = False
        product(x.requires_grad_(), weight).backward(grad_out)
        assert weight.grad_added_to_main_grad
        expected = expected + grad_out.double().t() @ prepared(x.detach()).double()
    # Products of bfloat16 are exact in float32, so one tolerance serves both dtypes.
    assert_close(weight.main_grad, expected, torch.float32)


def test_views_that_are_not_contiguous():
    """For instance, a key is a slice of the projection."""
    x = torch.randn(6, 3, 8, generator=torch.Generator().manual_seed(5))
    weight = torch.rand(4)
    assert_close(ops.rms_norm(x[:, 1, :4], weight, EPS), norm(x[:, 1, :4].double(), weight.double()), torch.float32)
    identity = torch.eye(4)
    assert_close(ops.swiglu_linear(x[:, 1:], identity)[0], swiglu(x[:, 1:].double()), torch.float32)
    assert_close(ops.swiglu_linear(x.transpose(0, 1), identity)[0], swiglu(x.transpose(0, 1).double()), torch.float32)
    normed, _ = ops.norm_linear(x[:, 1, :4], weight, EPS, identity, bias=None)
    assert_close(normed, norm(x[:, 1, :4].double(), weight.double()), torch.float32)


def test_silu_mul_of_extreme_gates():
    gate = torch.tensor([-1e4, -200.0, -88.0, 0.0, 88.0, 200.0, 1e4])
    x = torch.cat((gate, torch.full((7,), 2.0))).unsqueeze(0)
    expected = torch.tensor([[0.0, 0.0, 0.0, 0.0, 176.0, 400.0, 2e4]])  # silu(gate) * 2
    assert torch.allclose(torch.ops.brorl.silu_mul(x), expected)
    grad_then_out = torch.ones(1, 7)
    torch.ops.brorl.silu_mul_gradient_(grad_then_out, x)
    assert torch.allclose(grad_then_out, expected)
    assert torch.allclose(x[0, :7], torch.tensor([0.0, 0.0, 0.0, 1.0, 2.0, 2.0, 2.0]))  # 2 * silu'(gate)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "dim", "width"), [(1, 1, 2, 2), (9, 3, 10, 16), (200, 4, 64, 64)])
def test_rotate(tokens, heads, dim, width, dtype):
    """Queries and keys are rotated; values, and elements beyond the angles, are unchanged."""
    g = torch.Generator().manual_seed(dim)
    angle = torch.rand(tokens, dim // 2, generator=g).double() * 100
    angle_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    before = torch.randn(tokens, 2, heads + 2, width, generator=g).to(dtype)
    x = before.clone()
    cos = angle.cos().to(angle_dtype)
    sin = angle.sin().to(angle_dtype)
    torch.ops.brorl.rotate_(x[:, :, :-1], cos, sin, inverse=False)
    turned = x[:, :, :-1, :dim]
    assert_close(turned, rotate(before[:, :, :-1, :dim].flatten(1, 2).double(), angle).view_as(turned), dtype)
    assert torch.equal(x[:, :, -1], before[:, :, -1])
    assert torch.equal(x[..., dim:], before[..., dim:])
    torch.ops.brorl.rotate_(x[:, :, :-1], cos, sin, inverse=True)
    assert_close(x, before.double(), dtype)


def test_a_second_backward_pass_over_overwritten_inputs_fails():
    x = torch.randn(4, 6, requires_grad=True)
    weight = torch.randn(5, 3, requires_grad=True)
    out = ops.swiglu_linear(x.clone(), weight)[0].sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
        out.backward()


def test_results_do_not_depend_on_threads():
    g = torch.Generator().manual_seed(3)
    x, grad_out = torch.randn(2, 1500, 64, generator=g)
    weight = torch.rand(64, generator=g)

    def results():
        out, inverse = torch.ops.brorl.rms_norm(x, weight, EPS)
        return out, *torch.ops.brorl.rms_norm_gradient_(grad_out.clone(), x, weight, inverse)

    first, *others = with_threads(results)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
