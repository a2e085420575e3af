"""Masks by arithmetic against the rule itself, pair by pair, and against what FlexAttention makes of that."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from megatron_brorl.models.layers.block_mask import block_mask
from megatron_brorl.parallel.packing import Group

STREAMS = {
    "one token": (Group(0, ((1, 1),)),),
    "one causal segment": (Group(0, ((1, 384),)),),
    "segments end at blocks": (Group(0, ((3, 128), (1, 256))),),
    "segments end in blocks": (Group(0, ((7, 19), (2, 131), (1, 300))),),
    "a prompt of whole blocks": (Group(256, ((3, 128), (1, 257))),),
    "prompts and a pad": (Group(40, ((2, 70), (1, 200))), Group(131, ((5, 33),)), Group(0, ((1, 6),))),
    "a prompt alone": (Group(130, ()), Group(5, ((4, 90), (3, 91)))),
    "many short ones": tuple(Group(3 + i % 5, ((2, 1 + i % 7), (1, 9))) for i in range(40)),
}


def by_definition(groups) -> torch.Tensor:
    """Bool [T, T], pair by pair."""
    segments, at = [], 0  # (tokens, tokens of the prompt)
    for group in groups:
        prompt = range(at, at + group.prefix)
        lengths = [group.prefix, *(n for count, n in group.segments for _ in range(count))]
        for n in lengths:
            segments.append((range(at, at + n), prompt))
            at += n
    mask = torch.zeros(at, at, dtype=torch.bool)
    for tokens, prompt in segments:
        for i in tokens:
            for j in (*tokens, *prompt):
                mask[i, j] = j <= i
    return mask


@pytest.mark.parametrize("groups", STREAMS.values(), ids=STREAMS)
def test_it_is_what_flex_attention_makes_of_every_pair(groups):
    dense, mask = by_definition(groups), block_mask(groups, torch.device("cpu"))
    total = len(dense)
    expected = create_block_mask(lambda b, h, i, j: dense[i, j], None, None, total, total, device="cpu")
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        assert torch.equal(getattr(mask, name), getattr(expected, name)), name
    for name in ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"):  # of the backward pass
        assert torch.equal(getattr(mask, name), getattr(expected, name)), name
    assert mask.seq_lengths == expected.seq_lengths
    assert mask.BLOCK_SIZE == expected.BLOCK_SIZE

    # What the kernel asks within a block.
    i, j = torch.arange(total)[:, None], torch.arange(total)[None, :]
    assert torch.equal(mask.mask_mod(None, None, i, j), dense)
