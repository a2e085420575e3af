"""Qwen3: query and key heads are normed, and a head's size does not follow from the hidden size."""

from __future__ import annotations

from megatron_brorl.families import dense
from megatron_brorl.families.family import ModelFamily
from megatron_brorl.families.rope import one_rope

FAMILY = ModelFamily(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    requires=(
        dense.SILU,
        dense.FULL_ATTENTION,
        dense.NO_MLP_BIAS,
        dense.UNQUANTISED,
        dense.NO_ATTENTION_BIAS,
        dense.WHOLE_HEAD_ROPE,
    ),
    defaults={"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
    rest=one_rope,
    layer=(
        dense.ATTENTION_NORM,
        dense.QKV,
        dense.Q_NORM,
        dense.K_NORM,
        dense.ATTENTION_OUT,
        dense.MLP_NORM,
        dense.GATE_UP,
        dense.DOWN,
    ),
    embedding=dense.EMBEDDING,
    final_norm=dense.FINAL_NORM,
    head=dense.HEAD,
)
