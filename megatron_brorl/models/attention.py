"""Core attention over a packed stream, for machines without Transformer Engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass
class Segments(PackedSeqParams):
    """The segments of a stream, in the place where Megatron hands packing to the core attention.

    qkv_format stays None: rotary embeddings come with explicit positions (models.gpt), so Megatron must not restart
    them itself.
    """

    segments: tuple[tuple[int, int], ...] = ()  # (how many rows, tokens of each), as in parallel.batch.Packed


class PackedAttention(torch.nn.Module):
    """Causal attention within each segment; runs of equal length are one batched call on a view."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

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
        """query [T, 1, heads, d], key and value [T, 1, kv_heads, d] -> [T, 1, heads * d]."""
        heads, dim = query.shape[-2:]
        sizes = [count * length for count, length in packed_seq_params.segments]
        outputs = []
        streams = zip(*(x.split(sizes) for x in (query, key, value)), strict=True)
        for (count, length), qkv in zip(packed_seq_params.segments, streams, strict=True):
            q, k, v = (x.reshape(count, length, -1, dim).transpose(1, 2) for x in qkv)
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
            outputs.append(out.transpose(1, 2).reshape(-1, 1, heads * dim))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]
