"""Transformer Engine's layers. Import this module only on GPUs, because the import fails without CUDA."""

from __future__ import annotations

from typing import Any

from megatron.core.extensions.transformer_engine import (
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor
from torch.nn.functional import linear

from megatron_brorl.models.layers.attention import attend
from megatron_brorl.models.layers.lora import ColumnAdapted, RowAdapted, mlp_submodules


class AdaptedColumnLinear(ColumnAdapted, TELayerNormColumnParallelLinear):
    """Transformer Engine's fused norm and linear layer with adapters of the normed input, if any."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """[T, 1, in], not normed -> [T, 1, out/tp] and the bias, if Megatron adds it later."""
        a = self.stacked_a()
        self.return_layernorm_output = a is not None
        result, bias = super().forward(x)
        if a is None:
            return result, bias
        out, normed = result
        return self.with_adapters(out, linear(normed, a)), bias


class AdaptedRowLinear(RowAdapted, TERowParallelLinear):
    """Transformer Engine's row-parallel linear layer with adapters, if any."""


class PackedTeAttention(TEDotProductAttention):
    """Transformer Engine's variable-length attention over the groups of layers.attention.Segments.

    layers.attention computes streams with shared prompts.
    """

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
        # This layout has no batch dimension, which Megatron expects as a dimension of 1.
        query, key, value = (x.squeeze(1) for x in (query, key, value))
        if packed_seq_params.shared:
            scale = self.config.softmax_scale  # includes YaRN's factor
            return attend(query, key, value, packed_seq_params, scale).flatten(1).unsqueeze(1)
        packing = packed_seq_params.variable_length
        out = super().forward(query, key, value, attention_mask, packed_seq_params=packing, **kwargs)
        return out.reshape(len(query), 1, -1)


def layers(qk_norm: bool, count: int) -> TransformerBlockSubmodules:
    """Return `count` layers with fused norms and linears. qk_norm: whether query and key heads are normed."""
    spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_norm)
    attention, mlp = spec.submodules.self_attention.submodules, mlp_submodules(spec.submodules)
    attention.core_attention = PackedTeAttention
    attention.linear_qkv = mlp.linear_fc1 = AdaptedColumnLinear
    attention.linear_proj = mlp.linear_fc2 = AdaptedRowLinear
    return TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=TENorm)
