"""Decoding and sampling on CPUs by csrc/cpu/{decode_attention,layer_ops,sample_tokens}.*, and on GPUs by torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, rms_norm

from megatron_brorl.ops import rope
from megatron_brorl.ops.fused import linear, native
from megatron_brorl.ops.interface import DecodeBatch, HeadNorms
from megatron_brorl.ops.reference import sampling
from megatron_brorl.ops.reference.decode import DecodeOps

# With one split of the keys, a row's result does not depend on other rows. Older releases of torch never split here.
_ARGUMENTS = {a.name for a in torch.ops.aten._flash_attention_forward.default._schema.arguments}
_ONE_SPLIT = {"num_splits": 1} if "num_splits" in _ARGUMENTS else {}


class FusedDecode(DecodeOps):
    """DecodeOps on CPUs, for head sizes up to 256.

    Several queries read a prompt's pages together, new keys and values are written in place, and nothing is gathered.
    Tensors are float32 or bfloat16. Wrong shapes, dtypes and indices raise ValueError, TypeError or IndexError.
    """

    linear_logits = staticmethod(linear.linear_logits) if native.BFLOAT16_KERNEL else None

    def attend(
        self, qkv: Tensor, norms: HeadNorms | None, keys: Tensor, values: Tensor, batch: DecodeBatch, scale: float
    ) -> Tensor:
        pages = (batch.tables, batch.lengths, batch.prompt_tables, batch.prompt_lengths, batch.prompts)
        native.check_devices("decode_attention_", qkv, keys, values, batch.cos, batch.sin, *pages)
        _, kv_heads, dim, _ = keys.shape
        out = qkv.new_empty(len(qkv), qkv.shape[1] - 2 * kv_heads * dim)
        head_norms = (norms.q, norms.k, norms.eps) if norms else (None, None, 0.0)
        torch.ops.brorl.decode_attention_(qkv, *head_norms, batch.cos, batch.sin, keys, values, *pages, scale, out)
        return out

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        torch.ops.brorl.add_rms_norm_(x, delta, weight, eps, out)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return torch.ops.brorl.silu_mul(gate_up)


def sample_tokens(
    logits: Tensor, keys: Tensor, index: Tensor, position: Tensor, temperature: float, top_p: float, top_k: int
) -> tuple[Tensor, Tensor]:
    """Sample as ops.reference.sampling.sample_tokens, but without copying or sorting the logits.

    logits [B, V] are float32 or bfloat16, and rows may be strided; keys [B] are those of philox.uniforms. A
    row depends neither on other rows nor on the number of threads. An id can differ from the reference's if the uniform
    is within float32 rounding of a step of the CDF. -inf masks a token. Raises ValueError for a row with NaN or +inf or
    with nothing above -inf, and for a wrong shape, value or device; TypeError for a wrong dtype.
    """
    native.check_devices("sample_tokens", logits, keys, index, position)
    with torch.no_grad():
        return torch.ops.brorl.sample_tokens(logits, keys, index, position, temperature, top_p, top_k)


@dataclass(frozen=True)
class _Sequences:
    """Sequences of queries, each with its keys, in the terms of the kernels. Q queries, s sequences."""

    query_starts: Tensor  # [s + 1] int32: index of the first query of each sequence, and Q
    key_starts: Tensor  # [s + 1] int32: index of the first key of each sequence; the last number is not used
    key_counts: Tensor  # [s] int32: number of keys of each sequence
    max_queries: int  # maximum number of queries of a sequence
    sequence: Tensor  # [Q] int64: the sequence of each query
    rank: Tensor  # [Q] int64: index of each query in its sequence


@dataclass(frozen=True, kw_only=True)
class _FlashBatch(DecodeBatch):
    new_key: Tensor  # [B] int64: index of the key of each row's newest token
    own: _Sequences  # for the attention to own tokens
    prompt: _Sequences  # for the attention to prompts


class FlashDecode(DecodeOps):
    """DecodeOps on GPUs, by the attention kernels of torch.

    Keys and values are [pages, page, K, d], and batch.prompts must be ascending. Each row attends to its own tokens in
    one call and to its prompt in another one, in which the rows of a prompt are the queries of one sequence, so that
    its keys are read once for all of them (Juravsky et al. 2024, Hydragen). The query heads of a kv head are further
    queries, so that both calls have as many query heads as kv heads. The two results are merged by the log-sum-exp of
    their scores. No step waits for the device, so a CUDA graph can record it. torch's flash attention takes bfloat16
    and float16. Its memory-efficient attention takes float32.
    """

    contiguous = True
    linear_logits = staticmethod(linear.linear_logits)

    def takes(self, dtype: torch.dtype, head_dim: int) -> bool:
        if dtype in (torch.bfloat16, torch.float16):
            return head_dim % 8 == 0 and head_dim <= 256
        return dtype == torch.float32 and head_dim % 4 == 0

    def prepare(self, batch: DecodeBatch, page: int, queries_per_key: int) -> DecodeBatch:
        rows = len(batch.lengths)
        device = batch.lengths.device
        row_starts = torch.arange(rows + 1, device=device)
        group_starts = torch.searchsorted(batch.prompts, torch.arange(len(batch.prompt_lengths) + 1, device=device))

        def sequences(first_row: Tensor, table: Tensor, lengths: Tensor, max_rows: int) -> _Sequences:
            first_query = first_row * queries_per_key
            query = torch.arange(rows * queries_per_key, device=device)
            # An empty group has the first query of the next group, or Q. Of equal entries, take the last group.
            sequence = torch.searchsorted(first_query, query, right=True) - 1
            key_starts = pad(table[:, 0] * page, (0, 1))
            max_queries = max_rows * queries_per_key
            # Rows that pad a batch may make a group larger than `max_rows`. Nothing reads their results.
            rank = (query - first_query[sequence]).clamp(max=max_queries - 1)
            return _Sequences(first_query.int(), key_starts.int(), lengths.int(), max_queries, sequence, rank)

        return _FlashBatch(
            **vars(batch),
            new_key=batch.tables[:, 0].long() * page + batch.lengths - 1,
            own=sequences(row_starts, batch.tables, batch.lengths, max_rows=1),
            prompt=sequences(group_starts, batch.prompt_tables, batch.prompt_lengths, max_rows=batch.largest_group),
        )

    def attend(
        self, qkv: Tensor, norms: HeadNorms | None, keys: Tensor, values: Tensor, batch: DecodeBatch, scale: float
    ) -> Tensor:
        """See DecodeOps. batch: from `prepare`."""
        assert isinstance(batch, _FlashBatch)
        rows = len(qkv)
        _, page, kv_heads, dim = keys.shape
        heads = qkv.shape[1] // dim - 2 * kv_heads
        qk = qkv[:, : -kv_heads * dim].float().view(rows, -1, dim)
        if norms is not None:
            q, k = qk.split([heads, kv_heads], dim=1)
            q, k = rms_norm(q, (dim,), norms.q, norms.eps), rms_norm(k, (dim,), norms.k, norms.eps)
            qk = torch.cat((q, k), dim=1)
        cos, sin = (torch.cat((x, x), dim=-1).unsqueeze(1) for x in (batch.cos, batch.sin))
        q, k = rope.rotate(qk, cos, sin).to(keys.dtype).split([heads, kv_heads], dim=1)

        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        keys[batch.new_key] = k
        values[batch.new_key] = qkv[:, -kv_heads * dim :].view(rows, kv_heads, dim)

        q = q.unflatten(1, (kv_heads, -1)).transpose(1, 2).flatten(0, 1)  # [B * heads / K, K, d]
        own, own_lse = _attention(q, keys, values, batch.own, page, scale)
        prompt, prompt_lse = _attention(q, keys, values, batch.prompt, page, scale)
        weight = (prompt_lse - own_lse).sigmoid().unsqueeze(-1)
        out = torch.lerp(own.float(), prompt.float(), weight).to(qkv.dtype)
        return out.unflatten(0, (rows, -1)).transpose(1, 2).flatten(1)


def sample_tokens_on_gpu(
    logits: Tensor, keys: Tensor, index: Tensor, position: Tensor, temperature: float, top_p: float, top_k: int
) -> tuple[Tensor, Tensor]:
    """Sample as ops.reference.sampling.sample_tokens, with one kernel instead of 300 for the random numbers."""
    native.check_devices("sample_tokens", logits, keys, index, position)
    return sampling.sample(logits, torch.ops.brorl.uniforms(keys, index, position), temperature, top_p, top_k)


def _attention(
    q: Tensor, keys: Tensor, values: Tensor, sequences: _Sequences, page: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention [Q, K, d] of queries q [Q, K, d] to keys and values [tokens, K, d], and log-sum-exps [Q, K]."""
    s = sequences
    if q.dtype == torch.float32:
        out, lse, *_ = torch.ops.aten._efficient_attention_forward(
            q[None], keys[None], values[None], None, s.query_starts, s.key_starts, s.max_queries, page,
            dropout_p=0.0, custom_mask_type=0, compute_log_sumexp=True, scale=scale, seqlen_k=s.key_counts,
        )  # fmt: skip
        return out[0], lse[s.sequence, :, s.rank]  # the kernel pads the log-sum-exps of each sequence
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, keys, values, s.query_starts, s.key_starts, s.max_queries, page,
        dropout_p=0.0, is_causal=False, return_debug_mask=False, scale=scale, seqused_k=s.key_counts, **_ONE_SPLIT,
    )  # fmt: skip
    return out, lse.t()
