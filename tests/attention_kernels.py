"""torch's attention kernels for GPUs, on CPUs and in float64.

The contracts are those in attention.cu and attention_backward.cu of torch, and in torch.nn.attention.varlen.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch


def pieces(cum_q, cum_k, max_q, max_k, used=None):
    """Yield the slices of queries and keys per piece; check the kernels' preconditions. used: keys read per piece."""
    assert cum_q.dtype == cum_k.dtype == torch.int32
    if used is None:
        used = cum_k.diff()
        assert (max_q, max_k) == (int(cum_q.diff().max()), int(used.max()))
        assert int(used.min()) > 0
    assert used.dtype == torch.int32
    for (begin, end), first, count in zip(pairwise(cum_q.tolist()), cum_k[:-1].tolist(), used.tolist(), strict=True):
        yield slice(begin, min(end, begin + max_q)), slice(first, first + count)


def scores(q, k, causal, scale):
    """Return the scaled and masked scores [heads, l, n] of queries q [l, heads, d] and keys k [n, kv_heads, d]."""
    products = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
    return products.masked_fill(torch.ones_like(products, dtype=torch.bool).triu(1), -torch.inf) if causal else products


def forward(q, k, v, limits, causal, scale):
    """Return the output [T, heads, d] and the log-sum-exp [heads, T]. limits: the arguments of `pieces`."""
    out = torch.full_like(q, torch.nan)
    lse = q.new_full((q.shape[1], len(q)), torch.nan, dtype=torch.promote_types(q.dtype, torch.float32))
    for queries, keys in pieces(*limits):
        s = scores(q[queries].double(), k[keys].double(), causal, scale)
        lse[:, queries] = s.logsumexp(-1).to(lse.dtype)
        values = v[keys].double().repeat_interleave(q.shape[1] // v.shape[1], 1)
        out[queries] = torch.einsum("hij,jhd->ihd", s.softmax(-1), values).to(out.dtype)
    return out, lse


def backward(grad, q, k, v, out, lse, limits, causal, scale):
    """FlashAttention-2 (Dao 2023), algorithm 2, with the probabilities of the given log-sum-exp [heads, T]."""
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
    ratio = q.shape[1] // k.shape[1]
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for queries, keys in pieces(*limits):
        p = (scores(q[queries], k[keys], causal, scale) - lse[:, queries, None]).exp()
        dp = torch.einsum("ihd,jhd->hij", grad[queries], v[keys].repeat_interleave(ratio, 1))
        ds = p * (dp - (grad[queries] * out[queries]).sum(-1).t()[..., None]) * scale
        grads[0][queries] = torch.einsum("hij,jhd->ihd", ds, k[keys].repeat_interleave(ratio, 1))
        for total, weights, rows in ((grads[1], ds, q), (grads[2], p, grad)):
            total[keys] = torch.einsum("hij,ihd->jhd", weights, rows[queries]).unflatten(1, (-1, ratio)).sum(2)
    return tuple(grads)


def flash_forward(
    q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale, seqused_k=None, num_splits=None
):
    assert (dropout, debug) == (0.0, False)
    out, lse = forward(q, k, v, (cum_q, cum_k, max_q, max_k, seqused_k), causal, scale)
    return out, lse, q.new_empty(2), q.new_empty(0), q.new_empty(0)


def flash_backward(grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, rng, unused, *, scale):
    assert lse.is_contiguous()
    return backward(grad, q, k, v, out, lse, (cum_q, cum_k, max_q, max_k), causal, scale)


def efficient_forward(
    q, k, v, bias, cum_q, cum_k, max_q, max_k, dropout, mask, with_lse=False, *, scale, seqlen_k=None
):
    """q, k and v [1, tokens, heads, d]; log-sum-exp [pieces, heads, longest piece rounded up to 32]."""
    assert (bias, dropout, with_lse, q.shape[2]) == (None, 0.0, True, k.shape[2])
    out, lse = forward(q[0], k[0], v[0], (cum_q, cum_k, max_q, max_k, seqlen_k), mask == 1, scale)
    padded = lse.new_full((len(cum_q) - 1, q.shape[2], -(-max_q // 32) * 32), torch.nan)
    for i, (begin, end) in enumerate(pairwise(cum_q.tolist())):
        padded[i, :, : min(end - begin, max_q)] = lse[:, begin : min(end, begin + max_q)]
    return out[None], padded, q.new_empty(0), q.new_empty(0), max_q, max_k


def efficient_backward(
    grad, q, k, v, bias, out, cum_q, cum_k, max_q, max_k, lse, dropout, seed, offset, mask, biased, *, scale
):
    unpadded = []
    for padded, length in zip(lse, cum_q.diff().tolist(), strict=True):
        unpadded.append(padded[:, :length])
        assert bool((padded[:, length:] == torch.inf).all())
    tensors = (x[0] for x in (grad, q, k, v, out))
    grads = backward(*tensors, torch.cat(unpadded, 1), (cum_q, cum_k, max_q, max_k), mask == 1, scale)
    return *(x[None] for x in grads), q.new_empty(0)


@pytest.fixture
def kernels_on_cpu() -> Iterator[None]:
    """Register the four functions above as torch's attention kernels for CPUs."""
    library = torch.library.Library("aten", "IMPL")
    for run in (flash_forward, flash_backward, efficient_forward, efficient_backward):
        library.impl(f"_{run.__name__.replace('_', '_attention_')}", run, "CPU")  # _flash_attention_forward, ...
    yield
    library._destroy()
