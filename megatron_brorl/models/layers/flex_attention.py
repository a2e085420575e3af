"""Shared prompts on a GPU: one FlexAttention over the stream, masked by groups. Its backward pass exists on GPUs alone.

Not yet run on a GPU; the mask and the forward pass are tested on a CPU. See docs/measurements.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention


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
