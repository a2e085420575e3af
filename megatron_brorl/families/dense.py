"""Llama, Qwen2 and Qwen3, and the parameters that all dense families share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_brorl.families.family import ModelFamily, Parameter, Requirement, one_rope

EMBEDDING = Parameter("embedding.word_embeddings.weight", {"model.embed_tokens.weight": ("vocab", "hidden")}, "vocab")
FINAL_NORM = Parameter("decoder.final_layernorm.weight", {"model.norm.weight": ("hidden",)}, "whole", init="ones")
HEAD = Parameter("output_layer.weight", {"lm_head.weight": ("vocab", "hidden")}, layout="vocab")

ATTENTION_NORM = Parameter(
    "input_layernorm.weight",
    {"input_layernorm.weight": ("hidden",)},
    layout="whole",
    init="ones",
    fused="self_attention.linear_qkv.layer_norm_weight",
)
QKV = Parameter(
    "self_attention.linear_qkv.weight",
    {
        "self_attn.q_proj.weight": ("q", "hidden"),
        "self_attn.k_proj.weight": ("kv", "hidden"),
        "self_attn.v_proj.weight": ("kv", "hidden"),
    },
    layout="qkv",
)
QKV_BIAS = Parameter(
    "self_attention.linear_qkv.bias",
    {"self_attn.q_proj.bias": ("q",), "self_attn.k_proj.bias": ("kv",), "self_attn.v_proj.bias": ("kv",)},
    layout="qkv",
    init="zeros",
)
Q_NORM = Parameter("self_attention.q_layernorm.weight", {"self_attn.q_norm.weight": ("head",)}, "whole", init="ones")
K_NORM = Parameter("self_attention.k_layernorm.weight", {"self_attn.k_norm.weight": ("head",)}, "whole", init="ones")
ATTENTION_OUT = Parameter(
    "self_attention.linear_proj.weight", {"self_attn.o_proj.weight": ("hidden", "q")}, layout="columns", init="residual"
)
MLP_NORM = Parameter(
    "pre_mlp_layernorm.weight",
    {"post_attention_layernorm.weight": ("hidden",)},
    layout="whole",
    init="ones",
    fused="mlp.linear_fc1.layer_norm_weight",
)
GATE_UP = Parameter(
    "mlp.linear_fc1.weight",
    {"mlp.gate_proj.weight": ("ffn", "hidden"), "mlp.up_proj.weight": ("ffn", "hidden")},
    layout="gate_up",
)
DOWN = Parameter("mlp.linear_fc2.weight", {"mlp.down_proj.weight": ("hidden", "ffn")}, "columns", init="residual")


UNQUANTIZED = Requirement("quantization_config", (None, {}), "train from an unquantized checkpoint")
NO_ATTENTION_BIAS = Requirement("attention_bias", (False, None), "an output bias is not mapped")
WHOLE_HEAD_ROPE = Requirement("partial_rotary_factor", (1.0, None), "RoPE covers the whole head")
_LLAMA_REQUIRES = (
    Requirement("hidden_act", ("silu", "swish"), "only silu"),
    Requirement("use_sliding_window", (False, None), "only full attention"),
    Requirement("mlp_bias", (False, None), "no dense family here has one"),
    UNQUANTIZED,
    WHOLE_HEAD_ROPE,
)


def _family(
    name: str,
    defaults: Mapping[str, Any],
    head_parameters: tuple[Parameter, ...] = (),
    requires: tuple[Requirement, ...] = (NO_ATTENTION_BIAS,),
) -> ModelFamily:
    """Return a family whose layers are Llama's, with `head_parameters` after the projection to q, k and v."""
    return ModelFamily(
        name=name,
        architecture=f"{name.capitalize()}ForCausalLM",
        model_type=name,
        requires=(*_LLAMA_REQUIRES, *requires),
        defaults=defaults,
        rest=one_rope,
        layer=(ATTENTION_NORM, QKV, *head_parameters, ATTENTION_OUT, MLP_NORM, GATE_UP, DOWN),
        embedding=EMBEDDING,
        final_norm=FINAL_NORM,
        head=HEAD,
    )


LLAMA = _family("llama", {"max_position_embeddings": 2048})
# Qwen2 and Qwen2.5 have a bias on q, k and v, no matter what attention_bias in config.json says.
QWEN2 = _family("qwen2", {"num_key_value_heads": 32, "max_position_embeddings": 32768}, (QKV_BIAS,), requires=())
QWEN3 = _family(
    "qwen3", {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768}, (Q_NORM, K_NORM)
)
