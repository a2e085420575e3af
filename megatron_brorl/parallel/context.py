"""Context parallelism: divide the tokens of every segment of a packed stream over the ranks of a group.

Each segment is split into 2C chunks for C ranks, and rank r gets chunks r and 2C - 1 - r, so that all ranks do the same
work under a causal mask (Llama 3, Dubey et al. 2024, section 3.3.2). Transformer Engine's variable-length attention
expects this order.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_brorl.parallel.packing import Packed, PackedGroup


def own_tokens(groups: tuple[PackedGroup, ...], rank: int, size: int) -> Tensor:
    """Return the stream indices [T/size] int64 of a rank's tokens, in stream order.

    size: number of ranks. The length of every segment must be a multiple of 2 * size.
    """
    pieces = []
    begin = 0
    for length in segment_lengths(groups):
        chunk = length // (2 * size)
        for i in (rank, 2 * size - 1 - rank):
            pieces.append(torch.arange(begin + i * chunk, begin + (i + 1) * chunk))
        begin += length
    return torch.cat(pieces)


def split_for_rank(batch: Packed, rank: int, size: int) -> Packed:
    """Return a rank's part of a plain micro-batch: its tokens, and the response tokens that they predict.

    The fields groups, rows and counts still describe the whole stream.
    """
    own = own_tokens(batch.groups, rank, size)
    index = torch.full((len(batch.input_ids),), -1)
    index[own] = torch.arange(len(own))
    predict = index[batch.predict]
    kept = (predict >= 0).nonzero().squeeze(1)
    return replace(
        batch,
        input_ids=batch.input_ids[own],
        position_ids=batch.position_ids[own],
        predict=predict[kept],
        targets=batch.targets[kept],
        kept=kept,
        routes=None if batch.routes is None else batch.routes[own],
    )


def segment_lengths(groups: tuple[PackedGroup, ...]) -> list[int]:
    """Return the tokens of each segment of a plain stream, in stream order."""
    return [length for group in groups for count, length in group.segments for _ in range(count)]
