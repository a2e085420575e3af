"""Qwen2 and Qwen2.5: queries, keys and values have a bias, whatever config.json says of attention_bias."""

from __future__ import annotations

from megatron_brorl.families import dense
from megatron_brorl.families.family import ModelFamily
from megatron_brorl.families.rope import one_rope

FAMILY = ModelFamily(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    requires=(
        dense.SILU,
        dense.FULL_ATTENTION,
        dense.NO_MLP_BIAS,
        dense.UNQUANTISED,
        dense.WHOLE_HEAD_ROPE,
    ),
    defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768},
    rest=one_rope,
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
