"""torch's attention kernels for GPUs, on the CPU in float64, from their documentation (torch.nn.attention.varlen)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor


def _sequences(
    query: Tensor, key: Tensor, value: Tensor, queries: Tensor, keys: Tensor, lengths: Tensor, most: int, scale: float
) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
    """Yield number, queries, attention [n, heads, d] and log-sum-exps [n, heads] of each sequence, without a mask."""
    assert all(x.dtype == torch.int32 for x in (queries, keys, lengths))
    assert len(queries) == len(keys) == len(lengths) + 1
    for i, n in enumerate(lengths.tolist()):
        here = slice(int(queries[i]), min(int(queries[i + 1]), int(queries[i]) + most))
        k, v = (x[int(keys[i]) : int(keys[i]) + n].double() for x in (key, value))
        scores = torch.einsum("qhd,khd->qhk", query[here].double(), k) * scale
        yield i, here, torch.einsum("qhk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


def flash_attention_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask,
    *, scale, seqused_k, num_splits=None,
):  # fmt: skip
    """query [Q, heads, d], key and value [tokens, heads, d]; the log-sum-exps are [heads, Q]."""
    assert (dropout_p, is_causal, return_debug_mask) == (0.0, False, False)
    out = torch.full_like(query, float("nan"))
    lse = torch.full((query.shape[1], len(query)), float("nan"))
    for _, here, o, s in _sequences(query, key, value, cum_seq_q, cum_seq_k, seqused_k, max_q, scale):
        out[here], lse[:, here] = o.to(out.dtype), s.t().float()
    return out, lse, query.new_empty(0), query.new_empty(0), query.new_empty(0)


def efficient_attention_forward(
    query, key, value, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, custom_mask_type,
    compute_log_sumexp, *, scale, seqlen_k,
):  # fmt: skip
    """query, key and value [1, tokens, heads, d]; the log-sum-exps are [sequences, heads, max_seqlen_q, rounded up]."""
    assert (bias, dropout_p, custom_mask_type, compute_log_sumexp) == (None, 0.0, 0, True)
    out = torch.full_like(query, float("nan"))
    padded = -(-max_seqlen_q // 32) * 32
    lse = torch.full((len(seqlen_k), query.shape[2], padded), float("nan"))
    columns = (query[0], key[0], value[0], cu_seqlens_q, cu_seqlens_k, seqlen_k, max_seqlen_q, scale)
    for i, here, o, s in _sequences(*columns):
        out[0, here], lse[i, :, : len(s)] = o.to(out.dtype), s.t().float()
    return out, lse, query.new_empty(0), query.new_empty(0), max_seqlen_q, max_seqlen_k


@pytest.fixture
def kernels_on_cpu() -> Iterator[None]:
    """Give torch the kernels on CPUs."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", flash_attention_forward, "CPU")
    library.impl("_efficient_attention_forward", efficient_attention_forward, "CPU")
    yield
    library._destroy()
