"""Qwen2 and Qwen2.5: queries, keys and values have a bias, whatever config.json says of attention_bias."""

from __future__ import annotations

from megatron_brorl.families import dense
from megatron_brorl.families.family import ModelFamily

FAMILY = ModelFamily(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    requires=(
        dense.SILU,
        dense.FULL_ATTENTION,
        dense.NO_MLP_BIAS,
        dense.UNQUANTISED,
        dense.WHOLE_HEAD_ROPE,
    ),
    layer=(
        dense.ATTENTION_NORM,
        dense.QKV,
        dense.QKV_BIAS,
        dense.ATTENTION_OUT,
        dense.MLP_NORM,
        dense.GATE_UP,
        dense.DOWN,
    ),
    embedding=dense.EMBEDDING,
    final_norm=dense.FINAL_NORM,
    head=dense.HEAD,
)
