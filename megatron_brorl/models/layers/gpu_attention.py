"""Attention of the pieces of a stream on a GPU, by torch's flash and memory-efficient kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

# Queries per copy of a shared prompt. In the backward pass, a block of threads computes one head of one piece, so short
# pieces use more multiprocessors. Each piece has its own gradient of the prompt, so long pieces write less memory.
PIECE = 512
_FLASH = (torch.bfloat16, torch.float16)  # the memory-efficient kernels compute the other dtypes


def supports(query: Tensor) -> bool:
    """Return whether the kernels support query [T, heads, d]."""
    return query.is_cuda and query.dtype != torch.float64 and query.shape[-1] in range(8, 257, 8)


@dataclass(frozen=True)
class Pieces:
    """Attention of consecutive pieces of a stream's T queries to one range of n keys each."""

    limits: tuple[Tensor, Tensor, int, int]  # ends of queries and keys, [pieces + 1] int32; most per piece
    causal: bool
    ignored: Tensor | None = None  # [T, 1] bool: queries without keys. Their piece has one key, of weight 0.

    def forward(self, query: Tensor, key_value: Sequence[Tensor], scale: float) -> tuple[Tensor, Tensor]:
        """query [T, heads, d], key and value [n, kv_heads, d] -> output and log-sum-exp of the scores [T, heads]."""
        if query.dtype in _FLASH:
            flash = torch.ops.aten._flash_attention_forward
            settings = {"dropout_p": 0.0, "is_causal": self.causal, "return_debug_mask": False, "scale": scale}
            out, lse = flash(query, *key_value, *self.limits, **settings)[:2]
            lse = lse.t()
        else:
            efficient = torch.ops.aten._efficient_attention_forward  # None: no bias; last: dropout, mask, return lse
            batch = (x.unsqueeze(0) for x in (query, *_per_head(query, key_value)))
            out, lse = efficient(*batch, None, *self.limits, 0.0, int(self.causal), True, scale=scale)[:2]
            out, lse = out.squeeze(0), lse[self._padded_index]
        return out, lse if self.ignored is None else lse.masked_fill(self.ignored, -torch.inf)

    def backward(
        self, grad: Tensor, query: Tensor, key_value: Sequence[Tensor], out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, ...]:
        """Return the gradients of query, key and value. out and lse include the keys of other calls."""
        if self.ignored is not None:
            lse = lse.masked_fill(self.ignored, torch.inf)  # The probabilities exp(score - lse) are then 0.
        state = (lse.new_empty(0),) * 2  # of random numbers; unused without dropout
        if query.dtype in _FLASH:
            flash = torch.ops.aten._flash_attention_backward
            lse = lse.t().contiguous()
            with _deterministic():
                return flash(grad, query, *key_value, out, lse, *self.limits, 0.0, self.causal, *state, scale=scale)
        # The kernel reads whole blocks of 32 queries and expects infinity after the end of a piece.
        size = (len(self.limits[0]) - 1, lse.shape[1], -(-self.limits[2] // 32) * 32)
        padded = lse.new_full(size, torch.inf)
        padded[self._padded_index] = lse
        efficient = torch.ops.aten._efficient_attention_backward
        g, q, k, v, o = (x.unsqueeze(0) for x in (grad, query, *_per_head(query, key_value), out))
        settings = (0.0, *state, int(self.causal), False)  # dropout, random state, mask, gradient of a bias
        with _deterministic():
            grads = efficient(g, q, k, v, None, o, *self.limits, padded, *settings, scale=scale)[:3]
        query_grad, *head_grads = (x.squeeze(0) for x in grads)
        return query_grad, *(x.unflatten(1, (key_value[0].shape[1], -1)).sum(2) for x in head_grads)

    @cached_property
    def _padded_index(self) -> tuple[Tensor, slice, Tensor]:
        """The index of the queries [T, heads] in [pieces, heads, longest piece]."""
        ends = self.limits[0].long()
        piece = torch.arange(len(ends) - 1, device=ends.device).repeat_interleave(ends.diff())
        return piece, slice(None), torch.arange(len(piece), device=ends.device) - ends[piece]


def shared_prompts(table: Tensor, device: torch.device) -> tuple[Pieces, RepeatedRows]:
    """Return the attention to copies of the shared prompts, and the rows of the stream to copy.

    table: layers.attention.segment_table.
    """
    pieces = []  # number of queries, first key, number of keys
    for (prompt_start, prompt_length), rows in groupby(table.tolist(), key=lambda row: row[2:]):
        tokens = sum(row[1] for row in rows)
        pieces += [(min(PIECE, tokens - begin), prompt_start, prompt_length) for begin in range(0, tokens, PIECE)]
    queries, first_key, keys = torch.tensor(pieces).T
    ignored = (keys == 0).repeat_interleave(queries)
    keys = keys.clamp(min=1)
    # For each piece, its prompt's rows: first_key, first_key + 1, ..., first_key + keys - 1.
    copies = torch.arange(int(keys.sum())) + (first_key - keys.cumsum(0) + keys).repeat_interleave(keys)
    attention = Pieces(limits(queries, keys, device), causal=False, ignored=ignored.unsqueeze(1).to(device))
    return attention, RepeatedRows(copies.to(device), len(ignored))


def limits(queries: Tensor, keys: Tensor, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """Return Pieces.limits of pieces with these numbers of queries and keys."""
    ends = [torch.nn.functional.pad(x.cumsum(0), (1, 0)).to(device, torch.int32) for x in (queries, keys)]
    return ends[0], ends[1], int(queries.max()), int(keys.max())


def _per_head(query: Tensor, key_value: Sequence[Tensor]) -> list[Tensor]:
    return [x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in key_value]


@contextmanager
def _deterministic() -> Iterator[None]:
    """Let the kernels sum the gradient of the queries in a fixed order instead of by atomic additions."""
    # torch.use_deterministic_algorithms would also load the compiler, which takes seconds.
    enabled, warn_only = torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()
    fill = torch._C._get_deterministic_fill_uninitialized_memory()
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    torch._C._set_deterministic_fill_uninitialized_memory(False)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(enabled, warn_only=warn_only)
        torch._C._set_deterministic_fill_uninitialized_memory(fill)


@dataclass(frozen=True)
class RepeatedRows:
    """An index [n] int64 of a tensor's rows, which may repeat rows and omit others.

    The gradients of a row are summed in the order of the index, on a GPU in float32. Those of index_select would be
    summed there in any order, in the tensor's dtype.
    """

    index: Tensor
    rows: int

    def select(self, x: Tensor) -> Tensor:
        """x [rows, ...] -> [n, ...]."""
        return _Select.apply(x, self)

    @cached_property
    def readers(self) -> tuple[Tensor, Tensor]:
        """The positions in `index` that read row 0, row 1, ..., and the start of each row's positions among these."""
        order = self.index.argsort(stable=True)
        return order, torch.searchsorted(self.index[order], torch.arange(self.rows, device=order.device))


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, selection: RepeatedRows) -> Tensor:
        ctx.selection = selection
        return x.index_select(0, selection.index)

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> tuple[Tensor, None]:
        total = torch.embedding_bag(grad[0].flatten(1), *ctx.selection.readers)[0]
        return total.view(-1, *grad[0].shape[1:]), None
