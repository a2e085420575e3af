"""Llama: the family that the others are told apart from."""

from __future__ import annotations

from megatron_brorl.families import dense
from megatron_brorl.families.family import ModelFamily
from megatron_brorl.families.rope import one_rope

FAMILY = ModelFamily(
    name="llama",
    architecture="LlamaForCausalLM",
    model_type="llama",
    requires=(
        dense.SILU,
        dense.FULL_ATTENTION,
        dense.NO_MLP_BIAS,
        dense.UNQUANTISED,
        dense.NO_ATTENTION_BIAS,
        dense.WHOLE_HEAD_ROPE,
    ),
    defaults={"max_position_embeddings": 2048},
    rest=one_rope,
    layer=(
        dense.ATTENTION_NORM,
        dense.QKV,
        dense.ATTENTION_OUT,
        dense.MLP_NORM,
        dense.GATE_UP,
        dense.DOWN,
    ),
    embedding=dense.EMBEDDING,
    final_norm=dense.FINAL_NORM,
    head=dense.HEAD,
)
