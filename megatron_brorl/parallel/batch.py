"""Packing: many (prompt, response) rows of different lengths become one stream without padding.

Rows are sorted by length, so that rows of equal length stand side by side and attention over them is a plain batched
call on a view of the stream. The last token of a row predicts nothing and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """One micro-batch: a stream of T tokens, of which R response tokens are predicted."""

    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, from 0 in every segment
    segments: tuple[tuple[int, int], ...]  # (how many rows, tokens of each), in stream order; sums to T
    predict: Tensor  # [R] int64: the stream index whose hidden state predicts response token r
    targets: Tensor  # [R] int64: that token
    rows: tuple[int, ...]  # the rows packed, in stream order
    counts: Tensor  # [rows] int64: response tokens of each; sums to R

    @property
    def lengths(self) -> list[int]:
        """Tokens of each segment, in stream order."""
        return [length for count, length in self.segments for _ in range(count)]

    def gather(self, per_row: Sequence[Tensor]) -> Tensor:
        """Concatenate ragged per-token values of all rows ([G] each) into [R] in this batch's order."""
        return torch.cat([per_row[i] for i in self.rows]) if self.rows else self.targets.new_zeros(0).float()

    def repeat(self, per_row: Tensor) -> Tensor:
        """Spread one value per row over that row's response tokens: [B] -> [R]."""
        return per_row[list(self.rows)].repeat_interleave(self.counts)

    def split(self, values: Tensor) -> list[tuple[int, Tensor]]:
        """Cut per-token values [R] into (row, [G]) pairs."""
        return list(zip(self.rows, values.split(self.counts.tolist()), strict=True))


def pack(prompts: Sequence[Tensor], responses: Sequence[Tensor], max_tokens: int, multiple_of: int = 1) -> list[Packed]:
    """Pack rows into micro-batches of at most max_tokens stream tokens (a longer row gets one of its own).

    prompts and responses are [tokens] int64 each, none empty. multiple_of pads every stream with one dummy segment, as
    sequence parallelism asks. Without rows the result is one dummy micro-batch that predicts nothing, so that a rank
    that has nothing to train still takes part in the collectives.
    """
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]) + len(responses[i]), i))
    batches: list[list[int]] = [[]]
    used = 0
    for i in order:
        length = len(prompts[i]) + len(responses[i]) - 1
        if batches[-1] and used + length > max_tokens:
            batches.append([])
            used = 0
        batches[-1].append(i)
        used += length
    return [_pack_one(rows, prompts, responses, multiple_of) for rows in batches]


def _pack_one(rows: list[int], prompts: Sequence[Tensor], responses: Sequence[Tensor], multiple_of: int) -> Packed:
    pieces = [torch.cat((prompts[i], responses[i][:-1])) for i in rows]
    lengths = [len(p) for p in pieces]
    counts = torch.tensor([len(responses[i]) for i in rows], dtype=torch.int64)
    total = sum(lengths)
    pad = -total % multiple_of if total else multiple_of
    if pad:
        pieces.append(torch.zeros(pad, dtype=torch.int64))
        lengths.append(pad)
    starts = torch.tensor([0, *lengths]).cumsum(0)[: len(rows)]
    first = starts + torch.tensor([len(prompts[i]) for i in rows], dtype=torch.int64) - 1
    return Packed(
        input_ids=torch.cat(pieces),
        position_ids=_ramps(torch.tensor(lengths)),
        segments=tuple((len(list(same)), length) for length, same in groupby(lengths)),
        predict=first.repeat_interleave(counts) + _ramps(counts),
        targets=torch.cat([responses[i] for i in rows]) if rows else torch.zeros(0, dtype=torch.int64),
        rows=tuple(rows),
        counts=counts,
    )


def _ramps(lengths: Tensor) -> Tensor:
    """0..n-1 for each n, concatenated."""
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    return torch.arange(total) - (ends - lengths).repeat_interleave(lengths)
