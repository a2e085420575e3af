"""Core attention over a packed stream, without Transformer Engine or with shared prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_brorl.models.layers import gpu_attention
from megatron_brorl.models.layers.gpu_attention import RepeatedRows
from megatron_brorl.ops import rope
from megatron_brorl.ops.interface import compute_dtype
from megatron_brorl.parallel import cpu_bridge
from megatron_brorl.parallel.packing import PackedGroup, own_tokens, segment_lengths


@dataclass
class Segments(PackedSeqParams):
    """The groups and the rotary angles of a stream of T tokens. Megatron passes this object to core attention."""

    groups: tuple[PackedGroup, ...] = ()
    cos: Tensor | None = None  # [T, d / 2], float32 or float64: one table for all layers, queries and keys
    sin: Tensor | None = None
    local: tuple[Tensor, Tensor] | None = None  # cos and sin of local_layers
    local_layers: tuple[int, ...] = ()
    cp_group: dist.ProcessGroup | None = None  # ranks that split every segment; T counts this rank's tokens
    routes: Tensor | None = None  # experts of the tokens in a layer's input, see models.gpt.ReplayLayer

    @property
    def shared(self) -> bool:
        """Return whether segments attend to a shared prompt."""
        return any(g.prefix for g in self.groups)

    def rotate(self, x: Tensor, layer: int) -> Tensor:
        """Rotate x [T, heads, d], a query or key, by its position. layer: from 0, counted over all stages."""
        assert self.cos is not None
        assert self.sin is not None
        halves = self.local if self.local and layer in self.local_layers else (self.cos, self.sin)
        cos, sin = (torch.cat((half, half), dim=-1).unsqueeze(1).to(x.dtype) for half in halves)
        return rope.rotate(x, cos, sin)

    @cached_property
    def table(self) -> Tensor:
        """segment_table of the groups."""
        return segment_table(self.groups)

    @cached_property
    def variable_length(self) -> PackedSeqParams:
        """Transformer Engine's description of plain segments."""
        lengths = segment_lengths(self.groups)
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        ends = ends.to(cpu_bridge.default_device())
        # Queries and keys are the same tokens. Context parallelism divides the whole stream, padding included.
        return PackedSeqParams(
            qkv_format="thd",  # [tokens, heads, d], without a batch dimension
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            cu_seqlens_q_padded=ends,
            cu_seqlens_kv_padded=ends,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        )

    @cached_property
    def self_attention(self) -> gpu_attention.Pieces:
        """The kernels' description of the segments, each of which attends causally to itself."""
        lengths = self.table[:, 1]
        limits = gpu_attention.limits(lengths, lengths, cpu_bridge.default_device())
        return gpu_attention.Pieces(limits, causal=True)

    @cached_property
    def prompts(self) -> tuple[gpu_attention.Pieces, RepeatedRows]:
        """The kernels' description of the shared prompts, and the rows that they read."""
        return gpu_attention.shared_prompts(self.table, cpu_bridge.default_device())


def segment_table(groups: tuple[PackedGroup, ...]) -> Tensor:
    """Return [segments, 4] int64: start and length of each segment and of its shared prompt (length 0: none)."""
    rows = []
    begin = 0
    for group in groups:
        prompt = begin
        if group.prefix:
            rows.append((prompt, group.prefix, 0, 0))
            begin += group.prefix
        for count, length in group.segments:
            rows += [(begin + i * length, length, prompt, group.prefix) for i in range(count)]
            begin += count * length
    return torch.tensor(rows, dtype=torch.int64).view(-1, 4)


def attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None) -> Tensor:
    """Attend causally within each segment, and to its group's prompt.

    query [T, heads, d], key and value [T, kv_heads, d] -> [T, heads, d].
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if gpu_attention.supports(query):
        calls = [segments.self_attention]
        keys_values = [key, value]
        if segments.shared:
            to_prompts, copies = segments.prompts
            calls.append(to_prompts)
            keys_values += [copies.select(key), copies.select(value)]
        return _Attention.apply(scale, calls, query, *keys_values)

    outputs = []
    begin = 0
    for group in segments.groups:
        # The tokens of a group are contiguous: its prompt, then its runs of equally long segments.
        prompt = slice(begin, begin + group.prefix)
        begin += group.prefix + sum(count * length for count, length in group.segments)
        after_prompt = slice(prompt.stop, begin)
        q, k, v = (x[after_prompt] for x in (query, key, value))
        # Without a shared prompt every segment includes its own.
        if not group.prefix:
            outputs.append(_causal(q, k, v, group.segments, scale))
            continue
        prompt_q, prompt_k, prompt_v = (x[prompt] for x in (query, key, value))
        outputs.append(_causal(prompt_q, prompt_k, prompt_v, ((1, group.prefix),), scale))
        if not group.segments:
            continue
        if query.is_cuda:  # a dtype or head size that the kernels do not support
            outputs.append(_causal(q, k, v, group.segments, scale, (prompt_k, prompt_v)))
        else:
            to_prompt = _Runs(((1, len(q)),), ((1, group.prefix),), causal=False)
            to_own = _Runs(group.segments, group.segments, causal=True)
            outputs.append(_Attention.apply(scale, (to_prompt, to_own), q, prompt_k, prompt_v, k, v))
    return _concatenate(outputs)


class PackedAttention(torch.nn.Module):
    """Causal attention within each segment and to its group's prompt.

    On a CPU, one batched call computes consecutive segments of equal length.
    """

    def __init__(
        self, config: TransformerConfig, softmax_scale: float | None = None, layer_number: int = 1, **_: Any
    ) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.layer = layer_number - 1

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: Segments,
        **_: Any,
    ) -> Tensor:
        """query [T, 1, heads, d], key and value [T, 1, kv_heads, d], not yet rotated -> [T, 1, heads * d]."""
        # Megatron has not rotated query and key, because it does not know the positions.
        query, key = (packed_seq_params.rotate(x.squeeze(1), self.layer) for x in (query, key))
        value = value.squeeze(1)
        dtype = query.dtype
        if not query.is_cuda:  # the CPU's backward pass takes twice as long in bfloat16
            query, key, value = (x.to(compute_dtype(dtype)) for x in (query, key, value))
        # The configuration and parallel.packing refuse shared prompts with context parallelism.
        if packed_seq_params.cp_group is not None:
            out = self._over_ranks(query, key, value, packed_seq_params.groups, packed_seq_params.cp_group)
        else:
            out = attend(query, key, value, packed_seq_params, self.scale)
        return out.flatten(1).unsqueeze(1).to(dtype)

    def _over_ranks(
        self, query: Tensor, key: Tensor, value: Tensor, groups: tuple[PackedGroup, ...], ranks: dist.ProcessGroup
    ) -> Tensor:
        """Attend within each segment from this rank's queries [t, heads, d] to the keys and values of all ranks.

        key, value: this rank's [t, kv_heads, d].
        """
        # The keys and values of all ranks, in the order of the stream.
        size, rank = ranks.size(), ranks.rank()
        order = torch.cat([own_tokens(groups, r, size) for r in range(size)]).argsort().to(query.device)
        # The backward pass of this gather sums a key's gradient over the ranks that used it.
        key, value = (gather_from_sequence_parallel_region(x, group=ranks)[order] for x in (key, value))

        # This rank has two chunks of every segment, one from the front and one from the back (zigzag).
        segments = tuple(run for group in groups for run in group.segments)
        queries = _runs(tuple((count, length // size) for count, length in segments), query)
        outputs = []
        for (_, length), (q,), (k, v) in zip(segments, queries, _runs(segments, key, value), strict=True):
            chunk_length = length // (2 * size)
            # parallel.packing has padded every segment to a multiple of 2 * size, so chunks are equal.
            halves = q.unflatten(2, (2, chunk_length)).transpose(1, 2)  # [count, 2, heads, chunk, d]

            # A chunk attends to all earlier tokens of its segment, and causally to itself.
            attended = []
            for half, chunk in ((0, rank), (1, 2 * size - 1 - rank)):
                visible = (chunk + 1) * chunk_length  # keys from the start of the segment to the end of the chunk
                mask = torch.ones(chunk_length, visible, dtype=torch.bool, device=q.device).tril(visible - chunk_length)
                attended.append(
                    scaled_dot_product_attention(
                        halves[:, half], k[:, :, :visible], v[:, :, :visible], mask, scale=self.scale, enable_gqa=True
                    )
                )

            # Restore the order of this rank's queries.
            outputs.append(torch.stack(attended, dim=1).transpose(2, 3).flatten(0, 2))
        return _concatenate(outputs)


def _causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: tuple[tuple[int, int], ...],
    scale: float,
    prompt: Sequence[Tensor] = (),
) -> Tensor:
    """Attend within each segment: query [t, heads, d], key and value [t, kv_heads, d] -> [t, heads, d].

    prompt: the shared prompt's key and value [P, kv_heads, d], to which all queries attend, too.
    """
    outputs = []
    for (count, length), (q, k, v) in zip(segments, _runs(segments, query, key, value), strict=True):
        mask = None
        if prompt:
            prompt_k, prompt_v = (_batched(x, 1, len(x)).expand(count, -1, -1, -1) for x in prompt)
            k, v = torch.cat((prompt_k, k), dim=2), torch.cat((prompt_v, v), dim=2)
            mask = q.new_ones(length, k.shape[2], dtype=torch.bool).tril(len(prompt[0]))
        out = scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=True)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return _concatenate(outputs)


class _Attention(torch.autograd.Function):
    """Attention of the same queries to the keys of one or two calls.

    Two results are merged by the log-sum-exp of their scores. Given the merged output and log-sum-exp, the backward
    pass of each call is exact (as in ring attention, Liu et al. 2023).
    """

    @staticmethod
    def forward(
        ctx: Any, scale: float, calls: Sequence[gpu_attention.Pieces | _Runs], query: Tensor, *keys_values: Tensor
    ) -> Tensor:
        """query [t, heads, d], and key and value [n, kv_heads, d] of each call -> [t, heads, d]."""
        out, lse = calls[0].forward(query, keys_values[:2], scale)
        if len(calls) == 2:
            out, lse = _merge(out, lse, *calls[1].forward(query, keys_values[2:], scale))
        ctx.save_for_backward(query, out, lse, *keys_values)
        ctx.calls = calls
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of forward's inputs, given the gradient [t, heads, d] of its result."""
        query, out, lse, *keys_values = ctx.saved_tensors
        grad = upstream[0].contiguous()
        query_grad = None
        key_value_grads: list[Tensor] = []
        for i, call in enumerate(ctx.calls):
            key_value = keys_values[2 * i : 2 * i + 2]
            call_query_grad, *call_grads = call.backward(grad, query, key_value, out, lse, ctx.scale)
            query_grad = call_query_grad if query_grad is None else query_grad + call_query_grad
            key_value_grads += call_grads
        return None, None, query_grad, *key_value_grads


@dataclass(frozen=True)
class _Runs:
    """The CPU's counterpart of gpu_attention.Pieces: one batched call per run of equally long segments."""

    queries: tuple[tuple[int, int], ...]  # runs as (count, length)
    keys: tuple[tuple[int, int], ...]
    causal: bool

    def forward(self, query: Tensor, key_value: Sequence[Tensor], scale: float) -> Iterator[Tensor]:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        runs = zip(_runs(self.queries, query), _runs(self.keys, *key_value), strict=True)
        parts = [flash(*q, *kv, dropout_p=0.0, is_causal=self.causal, scale=scale) for q, kv in runs]
        return (_concatenate([_flat(p[i]) for p in parts]) for i in range(2))  # output and log-sum-exp

    def backward(
        self, grad: Tensor, query: Tensor, key_value: Sequence[Tensor], out: Tensor, lse: Tensor, scale: float
    ) -> Iterator[Tensor]:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        runs = zip(_runs(self.queries, grad, query, out, lse), _runs(self.keys, *key_value), strict=True)
        settings = {"dropout_p": 0.0, "is_causal": self.causal, "scale": scale}
        parts = [flash(g, q, *kv, o, run_lse, **settings) for (g, q, o, run_lse), kv in runs]
        return (_concatenate([_flat(p[i]) for p in parts]) for i in range(3))  # query, key and value


def _merge(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over two sets of keys, a and b [t, heads, d], by the log-sum-exp of their scores [t, heads].

    Return the attention over both sets and its log-sum-exp.
    """
    lse = torch.logaddexp(a_lse, b_lse)
    a_weight, b_weight = ((x - lse).exp().unsqueeze(-1) for x in (a_lse, b_lse))
    return (a_weight * a + b_weight * b).to(a.dtype), lse


def _concatenate(pieces: list[Tensor]) -> Tensor:
    """Concatenate the pieces without copying a single one."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _runs(segments: tuple[tuple[int, int], ...], *streams: Tensor) -> list[list[Tensor]]:
    """Return each stream [t, ...] as one batch per run of equally long segments."""
    sizes = [count * length for count, length in segments]
    parts = zip(*(x.split(sizes) for x in streams), strict=True)
    return [[_batched(x, *run) for x in part] for run, part in zip(segments, parts, strict=True)]


def _batched(x: Tensor, count: int, length: int) -> Tensor:
    """[count * length, heads, ...] -> [count, heads, length, ...], a view."""
    return x.unflatten(0, (count, length)).transpose(1, 2)


def _flat(x: Tensor) -> Tensor:
    """[count, heads, length, ...] -> [count * length, heads, ...]."""
    return x.transpose(1, 2).flatten(0, 1)
