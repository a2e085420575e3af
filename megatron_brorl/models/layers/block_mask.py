"""The mask of a packed stream for FlexAttention, by arithmetic on its segments.

create_block_mask asks the mask of every pair of tokens: at T = 32,768 that is 10^9 booleans and their sums. What a
token may attend to is at most two runs of tokens here, so that the pairs of every block of 128 x 128 are counted from
their ends: T steps and (T / 128)^2 numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from megatron_brorl.parallel.packing import Group

BLOCK = 128  # tokens of a block's side, FlexAttention's own


def block_mask(groups: tuple[Group, ...], device: torch.device) -> BlockMask:
    """Which of the stream's T tokens attend to which: causally, to their own segment and to their group's prompt.

    The same as torch.nn.attention.flex_attention.create_block_mask makes of that rule.
    """
    begin, front, end = _runs(groups)
    total = len(begin)
    pairs = _pairs_below(torch.arange(1, total + 1)) - _pairs_below(begin) + _pairs_below(end) - _pairs_below(front)

    # A block is skipped, computed with the mask, or computed without; one that the stream does not fill is never full.
    full, some = pairs == BLOCK * BLOCK, pairs > 0
    masked, masked_columns = (x.to(device) for x in _in_order(some & ~full))
    whole, whole_columns = (x.to(device) for x in _in_order(full))

    # Within the blocks that are computed with it, the mask is asked of pairs on the device.
    begin, front, end = (x.to(device) for x in (begin, front, end))

    def allowed(_batch: Tensor, _head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & ((j >= begin[i]) | ((j >= front[i]) & (j < end[i])))

    return BlockMask.from_kv_blocks(
        masked, masked_columns, whole, whole_columns, BLOCK_SIZE=BLOCK, mask_mod=allowed, seq_lengths=(total, total)
    )


def _runs(groups: tuple[Group, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Of every token i [T] int64: it attends to begin[i] .. i, and to front[i] .. end[i] - 1, which may be none."""
    # Of every segment: its tokens, its first one, and its group's prompt.
    rows, at = [], 0
    for group in groups:
        front = at
        if group.prefix:
            rows.append((group.prefix, front, front, front))
            at += group.prefix
        for count, length in group.segments:
            rows += [(length, at + i * length, front, front + group.prefix) for i in range(count)]
            at += count * length

    # The same of every token.
    lengths, *places = torch.tensor(rows, dtype=torch.int64).view(-1, 4).T
    begin, front_of, end = (x.repeat_interleave(lengths) for x in places)
    return begin, front_of, end


def _pairs_below(bound: Tensor) -> Tensor:
    """How many tokens of column block j stand before bound[i], summed over the i of row block q; [blocks, blocks].

    bound: a token per row, 0 .. T [T].
    """
    blocks = -(-len(bound) // BLOCK)
    row, column = torch.arange(len(bound)) // BLOCK, bound // BLOCK

    # Column blocks that lie wholly before the bound count BLOCK, the one that it falls into what is left. The last
    # column is that of bounds at the very end.
    place = row * (blocks + 1) + column
    counts = torch.bincount(place, minlength=blocks * (blocks + 1)).view(blocks, blocks + 1)
    rest = torch.zeros(blocks * (blocks + 1), dtype=torch.int64).index_add(0, place, bound % BLOCK)
    before = counts.sum(1, keepdim=True) - counts.cumsum(1)  # rows whose bound lies in a later column block
    return (BLOCK * before + rest.view_as(counts))[:, :blocks]


def _in_order(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row are chosen [1, 1, blocks], and the row's blocks, those first [1, 1, blocks, blocks];
    int32, as FlexAttention has them. chosen: bool [blocks, blocks]."""
    order = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]
