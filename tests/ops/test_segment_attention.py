"""Attention over a packed stream, against the matrix of all scores in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_brorl.ops import fused_layers as ops

OPS = torch.ops.brorl
# (tokens of the prompt or 0, tokens of each segment); queries go by blocks of 64, keys by rounds of 512
STREAMS = {
    "one token": [(0, (1,))],
    "alone": [(0, (5, 64, 65, 1, 130))],
    "a prompt": [(5, (3, 70, 1))],
    "a prompt of several rounds": [(700, (130, 64, 1))],
    "groups of all kinds": [(33, (7,) * 40), (0, (129, 2)), (64, (64, 64, 600))],
    "a prompt that nobody attends to": [(20, ()), (0, (4,))],
}


def table(groups: list[tuple[int, tuple[int, ...]]]) -> Tensor:
    rows, begin = [], 0
    for prompt, lengths in groups:
        front = begin
        if prompt:
            rows.append([front, prompt, 0, 0])
            begin += prompt
        for length in lengths:
            rows.append([begin, length, front, prompt])
            begin += length
    return torch.tensor(rows)


def brute_force(query: Tensor, key: Tensor, value: Tensor, segments: Tensor, scale: float) -> Tensor:
    seen = torch.zeros(len(query), len(query), dtype=torch.bool)
    for begin, length, prefix, of_prefix in segments.tolist():
        own = slice(begin, begin + length)
        seen[own, own] = torch.ones(length, length, dtype=torch.bool).tril()
        seen[own, prefix : prefix + of_prefix] = True
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.einsum("ihd,jhd->hij", query, key) * scale
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


def inputs(tokens: int, heads: int, kv_heads: int, dim: int, seed: int) -> list[Tensor]:
    """Query, key and value as views into one projection, as Megatron hands them over."""
    g = torch.Generator().manual_seed(seed)
    projected = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=g)
    return list(projected.split([heads, kv_heads, kv_heads], dim=1))


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(2, 2, 16), (4, 2, 64), (3, 1, 24)])
def test_result_and_gradients(stream, heads, kv_heads, dim):
    """Head sizes that are no multiple of 16 are filled up."""
    segments = table(STREAMS[stream])
    tokens = int(segments[:, 1].sum())
    narrow = [x.detach().requires_grad_() for x in inputs(tokens, heads, kv_heads, dim, seed=tokens)]
    wide = [x.detach().double().requires_grad_() for x in narrow]
    up = torch.randn(tokens, heads, dim, generator=torch.Generator().manual_seed(1))
    got, expected = ops.attend(*narrow, segments, dim**-0.5), brute_force(*wide, segments, dim**-0.5)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=3e-6)
    gradients = torch.autograd.grad(got, narrow, up), torch.autograd.grad(expected, wide, up.double())
    for mine, right in zip(*gradients, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=0, atol=3e-6 * max(1.0, float(right.abs().max())))


def test_large_scores():
    """Weights that are 0 or 1 in float32 are, and nothing overflows."""
    segments = table([(600, (3,))])
    query, key, value = inputs(603, 1, 1, 16, seed=2)
    got = ops.attend(query * 100, key * 100, value, segments, 1.0)
    expected = brute_force(query.double() * 100, key.double() * 100, value.double(), segments, 1.0)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-2)  # scores of 1e5 are rounded to 1e-2
    assert got[0].equal(value[0])


def test_results_do_not_depend_on_threads():
    segments = table(STREAMS["groups of all kinds"])
    query, key, value = inputs(int(segments[:, 1].sum()), 4, 2, 32, seed=3)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        out, sums = OPS.segment_attention(query, key, value, segments, 0.2)
        found.append(
            (
                out,
                sums,
                *OPS.segment_attention_gradient(query.contiguous(), query, key, value, out, sums, segments, 0.2),
            )
        )
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_opcheck():
    segments = table([(3, (2, 1))])
    query, key, value = inputs(6, 2, 1, 16, seed=4)
    torch.library.opcheck(OPS.segment_attention.default, (query, key, value, segments, 0.2))
    out, sums = OPS.segment_attention(query, key, value, segments, 0.2)
    arguments = (out.clone(), query, key, value, out, sums, segments, 0.2)
    torch.library.opcheck(OPS.segment_attention_gradient.default, arguments)


X = torch.zeros(4, 2, 16)


@pytest.mark.parametrize(
    ("query", "key", "segments", "error", "message"),
    [
        (X[..., :8], X[..., :8], [[0, 4, 0, 0]], ValueError, "d a multiple of 16"),
        (torch.zeros(4, 3, 16), X, [[0, 4, 0, 0]], ValueError, "key's heads divide its heads"),
        (X.double(), X.double(), [[0, 4, 0, 0]], TypeError, "query must be float32, got Double"),
        (X, X[:3], [[0, 4, 0, 0]], ValueError, r"key must be \[4, 2, 16\], got \[3, 2, 16\]"),
        (X, X.mT.contiguous().mT, [[0, 4, 0, 0]], ValueError, "key's last dimension must be contiguous"),
        (X, X, [[0, 4]], ValueError, r"segments must be \[S, 4\]"),
        (X, X, [[0, 3, 0, 0]], IndexError, "segments must cover 4 tokens, cover 3"),
        (X, X, [[0, 3, 0, 0], [3, 2, 0, 0]], IndexError, "must begin at token 3 and have 1 to 1 tokens, has 2 from 3"),
        (X, X, [[1, 3, 0, 0]], IndexError, "must begin at token 0"),
        (X, X, [[0, 3, 0, 0], [3, 1, 0, 2]], IndexError, r"segments\[1\]: tokens 0 \+ 2 are not an earlier segment"),
        (X, X, [[0, 3, 0, 1], [3, 1, 0, 0]], IndexError, "are not an earlier segment"),
        (X, X, [[0, 1, 0, 0], [1, 1, 0, 1], [2, 2, 1, 1]], IndexError, r"segments\[2\]: tokens 1 \+ 1 are not"),
    ],
)
def test_mistakes(query, key, segments, error, message):
    with pytest.raises(error, match=message):
        OPS.segment_attention(query, key, X[: len(key)] if len(key) < 4 else key, torch.tensor(segments), 1.0)
