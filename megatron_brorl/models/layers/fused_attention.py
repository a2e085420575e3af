"""Self-attention over a packed stream by csrc, on CPUs: queries, keys and values stay in one tensor."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from megatron_brorl.models.layers.attention import Segments
from megatron_brorl.ops.interface import compute_dtype
from megatron_brorl.parallel.packing import Group


class FusedSelfAttention(SelfAttention):
    """SelfAttention whose core, FusedAttention, gets the projection uncut, as Megatron orders it: for each kv head its
    queries, key and value."""

    def get_query_key_value_tensors(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None, None]:
        """hidden_states [T, 1, H] -> [T, kv_heads, heads of each + 2, d], not yet rotated, in place of the query."""
        projected, _ = self.linear_qkv(hidden_states)
        kv_heads, d = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        qkv = projected.view(len(projected), kv_heads, -1, d)
        # Without norms Megatron-Core 0.16 has an IdentityOp here, for which a copy would be wasted, and 0.19 None.
        if self.config.qk_layernorm:
            query, key, value = qkv.split([qkv.shape[2] - 2, 1, 1], dim=2)
            qkv = torch.cat((self.q_layernorm(query), self.k_layernorm(key), value), dim=2)
        return qkv, None, None


class FusedAttention(torch.nn.Module):
    """Causal attention within each segment and to its group's prompt, in float32 (ops.fused.layers)."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale
        self._called_twice = config.recompute_granularity == "selective"

    def forward(
        self,
        query: Tensor,
        key: None,
        value: None,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: Segments,
        **_: Any,
    ) -> Tensor:
        """query: what FusedSelfAttention gives, which is overwritten -> [T, 1, heads * d]."""
        from megatron_brorl.ops.fused import layers as fused_layers

        packing, qkv = packed_seq_params, query.to(compute_dtype(query.dtype))
        assert packing.cos is not None
        assert packing.sin is not None
        if self._called_twice and qkv is query:
            qkv = query.clone()  # the second call is to find it as the first one did
        if packing.table is None:
            packing.table = segment_table(packing.groups)
        out = fused_layers.attend(qkv, packing.cos, packing.sin, packing.table, self.scale or qkv.shape[-1] ** -0.5)
        return out.unsqueeze(1).to(query.dtype)


def segment_table(groups: tuple[Group, ...]) -> Tensor:
    """[segments, 4] int64: first token, tokens, first token and tokens of the prompt it attends to (0: none)."""
    rows, begin = [], 0
    for group in groups:
        front = begin
        if group.prefix:
            rows.append((front, group.prefix, 0, 0))
            begin += group.prefix
        for count, length in group.segments:
            rows += [(begin + i * length, length, front, group.prefix) for i in range(count)]
            begin += count * length
    return torch.tensor(rows, dtype=torch.int64).view(-1, 4)
