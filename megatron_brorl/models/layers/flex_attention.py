"""Attention on a GPU without Transformer Engine, and to shared prompts: one FlexAttention call over the stream.

Its backward pass needs a GPU. Tests on a CPU cover the mask and the forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None) -> Tensor:
    """query [T, heads, d], key and value [T, kv_heads, d] -> [T, heads, d]."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    run = _compiled(flex_attention) if query.is_cuda else flex_attention
    out: Tensor = run(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def block_mask(table: Tensor, device: torch.device) -> BlockMask:
    """Return the mask of a stream: a token attends causally to its own segment, and to its group's prompt.

    table: [segments, 4] as layers.attention.segment_table returns it.
    """
    first, length, prompt, prompt_length = table.to(device).T
    first, prompt, prompt_end = (x.repeat_interleave(length) for x in (first, prompt, prompt + prompt_length))

    def allowed(_batch: Tensor, _head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & ((j >= first[i]) | ((j >= prompt[i]) & (j < prompt_end[i])))

    create = _compiled(create_block_mask) if device.type == "cuda" else create_block_mask
    mask: BlockMask = create(allowed, None, None, len(first), len(first), device=device)
    return mask


@functools.cache
def _compiled(function: Callable[..., Any]) -> Any:
    """Compile a function for any stream length. Uncompiled, it would allocate a number per pair of tokens."""
    return torch.compile(function, dynamic=True)
