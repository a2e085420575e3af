"""What dense decoders have in common: their parameters under both names, and what no family here supports."""

from __future__ import annotations

from megatron_brorl.families.family import Parameter, Requirement

EMBEDDING = Parameter("embedding.word_embeddings.weight", {"model.embed_tokens.weight": ("vocab", "hidden")}, "vocab")
FINAL_NORM = Parameter("decoder.final_layernorm.weight", {"model.norm.weight": ("hidden",)}, "replicated", "ones")
HEAD = Parameter("output_layer.weight", {"lm_head.weight": ("vocab", "hidden")}, "vocab")

# Of a layer.
ATTENTION_NORM = Parameter(
    "input_layernorm.weight",
    {"input_layernorm.weight": ("hidden",)},
    "replicated",
    "ones",
    fused="self_attention.linear_qkv.layer_norm_weight",
)
QKV = Parameter(
    "self_attention.linear_qkv.weight",
    {
        "self_attn.q_proj.weight": ("q", "hidden"),
        "self_attn.k_proj.weight": ("kv", "hidden"),
        "self_attn.v_proj.weight": ("kv", "hidden"),
    },
    "qkv",
)
QKV_BIAS = Parameter(
    "self_attention.linear_qkv.bias",
    {"self_attn.q_proj.bias": ("q",), "self_attn.k_proj.bias": ("kv",), "self_attn.v_proj.bias": ("kv",)},
    "qkv",
    "zeros",
)
Q_NORM = Parameter("self_attention.q_layernorm.weight", {"self_attn.q_norm.weight": ("head",)}, "replicated", "ones")
K_NORM = Parameter("self_attention.k_layernorm.weight", {"self_attn.k_norm.weight": ("head",)}, "replicated", "ones")
ATTENTION_OUT = Parameter(
    "self_attention.linear_proj.weight", {"self_attn.o_proj.weight": ("hidden", "q")}, "columns", "residual"
)
MLP_NORM = Parameter(
    "pre_mlp_layernorm.weight",
    {"post_attention_layernorm.weight": ("hidden",)},
    "replicated",
    "ones",
    fused="mlp.linear_fc1.layer_norm_weight",
)
GATE_UP = Parameter(
    "mlp.linear_fc1.weight",
    {"mlp.gate_proj.weight": ("ffn", "hidden"), "mlp.up_proj.weight": ("ffn", "hidden")},
    "gate_up",
)
DOWN = Parameter("mlp.linear_fc2.weight", {"mlp.down_proj.weight": ("hidden", "ffn")}, "columns", "residual")

SILU = Requirement("hidden_act", ("silu", "swish"), "only silu")
FULL_ATTENTION = Requirement("use_sliding_window", (False, None), "only full attention")
NO_MLP_BIAS = Requirement("mlp_bias", (False, None), "no dense family here has one")
UNQUANTISED = Requirement("quantization_config", (None, {}), "train from an unquantised checkpoint")
NO_ATTENTION_BIAS = Requirement("attention_bias", (False, None), "an output bias is not mapped")
WHOLE_HEAD_ROPE = Requirement("partial_rotary_factor", (1.0, None), "RoPE covers the whole head")
