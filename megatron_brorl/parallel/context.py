"""Context parallelism: the tokens of every segment of a packed stream over the ranks of a group.

Of a segment's 2C chunks rank r gets chunks r and 2C - 1 - r, so that all C ranks do the same work under a causal mask
(Llama 3, Dubey et al. 2024, section 3.3.2). Transformer Engine's variable-length attention expects this cut.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_brorl.parallel.packing import Group, Packed


def own_tokens(groups: tuple[Group, ...], rank: int, size: int) -> Tensor:
    """Stream indices [T/size] int64 of a rank's tokens, in stream order. Segments are multiples of 2 x size."""
    pieces, begin = [], 0
    for length in segment_lengths(groups):
        chunk = length // (2 * size)
        for place in (rank, 2 * size - 1 - rank):
            pieces.append(torch.arange(begin + place * chunk, begin + (place + 1) * chunk))
        begin += length
    return torch.cat(pieces)


def share(batch: Packed, rank: int, size: int) -> Packed:
    """A rank's part of a plain micro-batch: its tokens, and the response tokens that those predict.

    `groups` still describes the whole stream, rows and counts all of its rows.
    """
    own = own_tokens(batch.groups, rank, size)
    place = torch.full((len(batch.input_ids),), -1)
    place[own] = torch.arange(len(own))
    predict = place[batch.predict]
    kept = (predict >= 0).nonzero().squeeze(1)
    return replace(
        batch,
        input_ids=batch.input_ids[own],
        position_ids=batch.position_ids[own],
        predict=predict[kept],
        targets=batch.targets[kept],
        kept=kept,
    )


def segment_lengths(groups: tuple[Group, ...]) -> list[int]:
    """Tokens of each segment of a plain stream, in its order."""
    return [length for group in groups for count, length in group.segments for _ in range(count)]
