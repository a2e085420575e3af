"""Rotation and attention over a packed stream, against the matrix of all scores in float64."""

from __future__ import annotations

import pytest
import torch
from threads import with_threads
from torch import Tensor

from megatron_brorl.ops.fused import layers as ops

OPS = torch.ops.brorl
# (tokens of the prompt or 0, tokens of each segment). The kernel's blocks have 64 queries and 512 keys.
STREAMS = {
    "one token": [(0, (1,))],
    "alone": [(0, (5, 64, 65, 1, 130))],
    "a prompt": [(5, (3, 70, 1))],
    "a prompt of several rounds": [(700, (130, 64, 1))],
    "groups of all kinds": [(33, (7,) * 40), (0, (129, 2)), (64, (64, 64, 600))],
    "a prompt without responses": [(20, ()), (0, (4,))],
}


def table(groups: list[tuple[int, tuple[int, ...]]]) -> Tensor:
    """Return the segments [S, 4]: first token and length of each, and of its prefix."""
    rows = []
    begin = 0
    for prompt, lengths in groups:
        prefix = begin
        if prompt:
            rows.append([prefix, prompt, 0, 0])
            begin += prompt
        for length in lengths:
            rows.append([begin, length, prefix, prompt])
            begin += length
    return torch.tensor(rows)


def brute_force(qkv: Tensor, angle: Tensor, segments: Tensor, scale: float) -> Tensor:
    """Attend with the matrix of all scores; pairs (i, i + d / 2) are rotated as complex numbers."""
    tokens, _, slots, d = qkv.shape  # slots: a group's queries, its key and its value
    half = d // 2
    turn = torch.polar(torch.ones_like(angle), angle)[:, None, None]
    turned = torch.complex(qkv[..., :half], qkv[..., half:]) * turn
    query, key, _ = torch.cat((turned.real, turned.imag), dim=-1).split([slots - 2, 1, 1], dim=2)
    value = qkv[:, :, -1:]
    visible = torch.zeros(tokens, tokens, dtype=torch.bool)
    for begin, length, prefix, prefix_length in segments.tolist():
        segment = slice(begin, begin + length)
        visible[segment, segment] = torch.ones(length, length, dtype=torch.bool).tril()
        visible[segment, prefix : prefix + prefix_length] = True
    scores = torch.einsum("ighd,jgkd->ghij", query, key) * scale
    return torch.einsum("ghij,jgkd->ighd", scores.masked_fill(~visible, -torch.inf).softmax(-1), value).flatten(1)


def inputs(tokens: int, kv_heads: int, heads: int, dim: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return a projection [tokens, kv_heads, heads + 2, dim], as Megatron orders it, and angles in float64."""
    g = torch.Generator().manual_seed(seed)
    angle = torch.rand(tokens, dim // 2, generator=g).double() * 100
    return torch.randn(tokens, kv_heads, heads + 2, dim, generator=g), angle


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize(("kv_heads", "heads", "dim"), [(2, 1, 16), (2, 2, 64), (1, 3, 24)])
def test_result_and_gradient(stream, kv_heads, heads, dim):
    """Head sizes that are not a multiple of 16 are padded."""
    segments = table(STREAMS[stream])
    tokens = int(segments[:, 1].sum())
    qkv, angle = inputs(tokens, kv_heads, heads, dim, seed=tokens)
    in_float32, in_float64 = qkv.clone().requires_grad_(), qkv.double().requires_grad_()
    upstream = torch.randn(tokens, kv_heads * heads * dim, generator=torch.Generator().manual_seed(1))
    result = ops.attend(in_float32.clone(), angle.cos().float(), angle.sin().float(), segments, dim**-0.5)
    expected = brute_force(in_float64, angle, segments, dim**-0.5)
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=3e-6)
    (grad,) = torch.autograd.grad(result, in_float32, upstream)
    (exact,) = torch.autograd.grad(expected, in_float64, upstream.double())
    torch.testing.assert_close(grad.double(), exact, rtol=0, atol=3e-6 * max(1.0, float(exact.abs().max())))


@pytest.mark.parametrize("dim", [16, 24])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_gradient_reaches_the_projection(normed, with_bias, dim):
    """Attention overwrites a view of the result of another op, as in FusedSelfAttention."""
    segments = table([(3, (2, 4))])
    _, angle = inputs(9, kv_heads=2, heads=2, dim=dim, seed=6)
    g = torch.Generator().manual_seed(7)
    x = torch.randn(9, 1, 8, generator=g)
    weight = torch.randn(2 * 4 * dim, 8, generator=g) / 3
    norm = torch.rand(8, generator=g) + 0.5
    bias = torch.randn(2 * 4 * dim, generator=g) if with_bias else None
    in_float32 = [t.clone().requires_grad_() for t in (x, weight, norm)]
    in_float64 = [t.double().requires_grad_() for t in (x, weight, norm)]
    upstream = torch.randn(9, 2 * 2 * dim, generator=g)

    if normed:
        projected, _ = ops.norm_linear(in_float32[0], in_float32[2], 1e-6, in_float32[1], bias)
        rows = torch.nn.functional.rms_norm(in_float64[0], (8,), in_float64[2], 1e-6)
    else:
        projected, _ = ops.linear(in_float32[0], in_float32[1], bias)
        rows = in_float64[0]
    result = ops.attend(projected.view(9, 2, 4, dim), angle.cos().float(), angle.sin().float(), segments, dim**-0.5)
    qkv = torch.nn.functional.linear(rows, in_float64[1], bias.double() if with_bias else None).view(9, 2, 4, dim)
    expected = brute_force(qkv, angle, segments, dim**-0.5)

    used = slice(3 if normed else 2)
    grads = torch.autograd.grad(result, in_float32[used], upstream)
    expected_grads = torch.autograd.grad(expected, in_float64[used], upstream.double())
    for a, b in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=1e-5 * float(b.abs().max()))


def test_large_scores():
    """Weights are exactly 0 or 1, and nothing overflows."""
    segments = table([(600, (3,))])
    qkv, _ = inputs(603, kv_heads=1, heads=1, dim=16, seed=2)
    qkv[:, :, :2] *= 100
    angle = torch.zeros(603, 8)
    expected = brute_force(qkv.double(), angle.double(), segments, scale=1.0)
    result = ops.attend(qkv, angle.cos(), angle.sin(), segments, scale=1.0)
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=1e-2)  # scores of 1e5 are rounded to 1e-2
    assert result[0].equal(qkv[0, 0, 2])  # token 0 sees only its own value


def test_backward_of_an_overwritten_input_fails():
    """A function that saved the projection must not compute its gradient from the rotated projection."""
    qkv, angle = inputs(4, kv_heads=1, heads=1, dim=16, seed=5)
    projected = qkv.requires_grad_().exp()  # The backward pass of exp needs its result.
    out = ops.attend(projected, angle.cos().float(), angle.sin().float(), table([(0, (4,))]), scale=1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        out.sum().backward()


def test_results_do_not_depend_on_threads():
    segments = table(STREAMS["groups of all kinds"])
    qkv, _ = inputs(int(segments[:, 1].sum()), kv_heads=2, heads=2, dim=32, seed=3)
    upstream = qkv[:, :, :2].contiguous()

    def results():
        out, sums = OPS.segment_attention(qkv, segments, scale=0.2)
        return out, sums, OPS.segment_attention_gradient(upstream, qkv, out, sums, segments, scale=0.2)

    first, *others = with_threads(results)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


X = torch.zeros(4, 2, 3, 16)


@pytest.mark.parametrize(
    ("qkv", "segments", "error", "message"),
    [
        (X.double(), [[0, 4, 0, 0]], TypeError, "qkv must be float32, got Double"),
        (X, [[0, 3, 0, 0]], IndexError, "segments must cover 4 tokens, cover 3"),
        (X, [[0, 3, 0, 0], [3, 2, 0, 0]], IndexError, "must begin at token 3 and have 1 to 1 tokens, has 2 from 3"),
        (X, [[1, 3, 0, 0]], IndexError, "must begin at token 0"),
        (X, [[0, 3, 0, 0], [3, 1, 0, 2]], IndexError, r"segments\[1\]: tokens 0 \+ 2 are not an earlier segment"),
        (X, [[0, 3, 0, 1], [3, 1, 0, 0]], IndexError, "are not an earlier segment"),
        (X, [[0, 1, 0, 0], [1, 1, 0, 1], [2, 2, 1, 1]], IndexError, r"segments\[2\]: tokens 1 \+ 1 are not"),
    ],
)
def test_mistakes(qkv, segments, error, message):
    with pytest.raises(error, match=message):
        OPS.segment_attention(qkv, torch.tensor(segments), scale=1.0)
