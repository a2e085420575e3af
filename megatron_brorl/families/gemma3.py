"""Gemma 3's text models: norms before and after each part, GeGLU, scaled embeddings, two rotations.

Most layers attend to a sliding window and have a rotation of their own. Windows are not computed. The context is
limited to the window's size, up to which windowed and full attention are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_brorl.errors import UserError, shown
from megatron_brorl.families import dense
from megatron_brorl.families.family import ConfigJson, ModelFamily, Parameter, Requirement, positive, read_rope

# Norms of the outputs of attention and MLP, before these are added to the residual stream. The names are those of
# NVIDIA's Megatron-Bridge.
POST_ATTENTION_NORM = Parameter(
    "self_attention.linear_proj.post_layernorm.weight",
    {"post_attention_layernorm.weight": ("hidden",)},
    layout="whole",
    init="zeros",
)
POST_MLP_NORM = Parameter(
    "mlp.linear_fc2.post_layernorm.weight", {"post_feedforward_layernorm.weight": ("hidden",)}, "whole", init="zeros"
)
_LOCAL = "sliding_attention"  # a value of layer_types
_FULL = "full_attention"  # the other value


def _rest(config: ConfigJson) -> Mapping[str, Any]:
    """Return the fields of ModelShape that only Gemma has or reads differently."""
    layers = config.get("num_hidden_layers", int, most=10_000)

    # Find the local layers. Earlier versions of transformers wrote only the interval between full layers.
    interval = config.get("sliding_window_pattern", int, 6)
    kinds = config.get("layer_types", list, []) or [_LOCAL if (i + 1) % interval else _FULL for i in range(layers)]
    # A guess for a missing layer would rotate it wrongly without any error.
    if len(kinds) != layers or not all(kind in (_LOCAL, _FULL) for kind in kinds):
        raise UserError(f"{config.where}: layer_types = {shown(kinds)}: must name {_LOCAL} or {_FULL} for each layer")
    local = tuple(i for i, kind in enumerate(kinds) if kind == _LOCAL)

    # Local layers are never scaled, full layers at most linearly. rope_scaling overrides keys of the full layers.
    # A base outside of the rope objects is the default.
    ropes = ConfigJson(config.get("rope_parameters", dict, {}), config.where)
    full_rope = {**ropes.get(_FULL, dict, {}), **config.get("rope_scaling", dict, {})}
    theta, scaling = read_rope(config, full_rope, _FULL, config.get("rope_theta", float, 1e6), ("default", "linear"))
    default_base = config.get("rope_local_base_freq", float, 1e4)
    local_theta, _ = read_rope(config, ropes.get(_LOCAL, dict, {}), _LOCAL, default_base, ("default",))

    context = config.get("max_position_embeddings", int)
    # The scale of attention scores does not follow from head_dim.
    scalar = positive(config.raw.get("query_pre_attn_scalar"), 256.0, f"{config.where}: query_pre_attn_scalar")
    return {
        "context": min(context, config.get("sliding_window", int, 4096)) if local else context,
        "rope_theta": theta,
        "rope_scaling": scaling,  # of full layers
        "local_layers": local,
        "local_rope_theta": local_theta,
        "attention_scale": scalar**-0.5,
        "embedding_scale": config.get("hidden_size", int) ** 0.5,  # not applied in the tied head
        "activation": "gelu_tanh",
    }


def _zero_centred(norm: Parameter) -> Parameter:
    """Return the norm as one that scales by 1 + weight."""
    return replace(norm, init="zeros")


FAMILY = ModelFamily(
    name="gemma3",
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    requires=(
        Requirement("hidden_activation", ("gelu_pytorch_tanh",), "only gelu_pytorch_tanh"),
        Requirement("attn_logit_softcapping", (None,), "scores are not capped"),
        Requirement("final_logit_softcapping", (None,), "logits are not capped"),
        Requirement("use_bidirectional_attention", (False, None), "only causal attention"),
        dense.UNQUANTIZED,
        dense.NO_ATTENTION_BIAS,
        dense.WHOLE_HEAD_ROPE,
    ),
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    rest=_rest,
    layer=(
        _zero_centred(dense.ATTENTION_NORM),
        dense.QKV,
        _zero_centred(dense.Q_NORM),
        _zero_centred(dense.K_NORM),
        dense.ATTENTION_OUT,
        POST_ATTENTION_NORM,
        replace(_zero_centred(dense.MLP_NORM), hf={"pre_feedforward_layernorm.weight": ("hidden",)}),
        dense.GATE_UP,
        dense.DOWN,
        POST_MLP_NORM,
    ),
    embedding=dense.EMBEDDING,
    final_norm=_zero_centred(dense.FINAL_NORM),
    head=dense.HEAD,
)
