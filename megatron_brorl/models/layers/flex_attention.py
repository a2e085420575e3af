"""Shared prompts on a GPU: one FlexAttention over the stream, masked by groups. Its backward pass exists on GPUs alone.

Not yet run on a GPU; the mask and the forward pass are tested on a CPU. See docs/measurements.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from megatron_brorl.parallel.batch import Group


def block_mask(groups: tuple[Group, ...], device: torch.device) -> BlockMask:
    """Which of the stream's T tokens attend to which: causally, to their own segment and to their group's prompt."""
    # Of every segment: its length, its group, and whether it is the group's prompt.
    prompts, segments, members = [], [], []
    for number, group in enumerate(groups):
        lengths = [group.prefix, *(n for count, n in group.segments for _ in range(count))]
        prompts += [True, *[False] * (len(lengths) - 1)]
        segments += lengths
        members += [number] * len(lengths)

    # The same of every token.
    sizes = torch.tensor(segments)
    segment = torch.arange(len(sizes)).repeat_interleave(sizes).to(device)
    member = torch.tensor(members).repeat_interleave(sizes).to(device)
    prompt = torch.tensor(prompts).repeat_interleave(sizes).to(device)

    def allowed(_batch: Tensor, _head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & ((segment[i] == segment[j]) | ((member[i] == member[j]) & prompt[j]))

    total = int(sizes.sum())
    return create_block_mask(allowed, None, None, total, total, device=str(device))


def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None) -> Tensor:
    """query [T, heads, d], key and value [T, kv_heads, d] -> [T, heads, d]."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    run = _compiled() if query.is_cuda else flex_attention
    out: Tensor = run(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


@functools.cache
def _compiled() -> Any:
    """Uncompiled, it holds all scores at once. Streams differ in length, so sizes stay dynamic."""
    return torch.compile(flex_attention, dynamic=True)
