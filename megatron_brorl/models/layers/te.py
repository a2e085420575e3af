"""Transformer Engine's layers for GPUs that have it. Imported only there: without CUDA its import fails.

Not yet run on a GPU; see docs/measurements.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from megatron_brorl.parallel.context import segment_lengths


class PackedTeAttention(TEDotProductAttention):
    """Transformer Engine's variable-length attention over the groups of layers.attention.Segments; FlexAttention where
    prompts are shared."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: Any,
        **kwargs: Any,
    ) -> Tensor:
        """query [T, 1, heads, d], key and value [T, 1, kv_heads, d] -> [T, 1, heads * d]."""
        if packed_seq_params.shared:
            streams = (x.squeeze(1) for x in (query, key, value))
            return packed_seq_params.attend_on_gpu(*streams, self.config.softmax_scale)  # YaRN's factor is in it

        # One boundary per segment, as Transformer Engine wants them.
        lengths = segment_lengths(packed_seq_params.groups)
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(query.device)

        # Queries and keys are the same tokens: this is self-attention.
        packing = PackedSeqParams(
            qkv_format="thd",  # [tokens, heads, d]: no dimension for a batch
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            cu_seqlens_q_padded=ends,  # of the whole stream, which context parallelism divides; padding is a token too
            cu_seqlens_kv_padded=ends,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        )

        streams = (x.squeeze(1) for x in (query, key, value))
        # Megatron's extra dimension of 1 goes away for this layout and comes back after it.
        out = super().forward(*streams, attention_mask, packed_seq_params=packing, **kwargs)
        return out.reshape(len(query), 1, -1)


def layers(qk_norm: bool, count: int) -> TransformerBlockSubmodules:
    """`count` layers with fused norms and linears. qk_norm: whether query and key heads are normed."""
    spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_norm)
    spec.submodules.self_attention.submodules.core_attention = PackedTeAttention
    return TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=TENorm)
