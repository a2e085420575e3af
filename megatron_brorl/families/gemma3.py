"""Gemma 3's text models: norms before and after each part, GeGLU, scaled embeddings, two rotations.

Most layers attend to a sliding window with a rotation of their own. Windows are not computed: the context ends where
the window does, and up to there both kinds of layers see everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_brorl.errors import UserError, shown
from megatron_brorl.families import dense
from megatron_brorl.families.family import ConfigJson, ModelFamily, Parameter, Requirement, positive

# The norms of what attention and MLP give, before it is added to the residual stream; named as NVIDIA's Megatron-Bridge
# names them.
POST_ATTENTION_NORM = Parameter(
    "self_attention.linear_proj.post_layernorm.weight",
    {"post_attention_layernorm.weight": ("hidden",)},
    "replicated",
    "zeros",
)
POST_MLP_NORM = Parameter(
    "mlp.linear_fc2.post_layernorm.weight",
    {"post_feedforward_layernorm.weight": ("hidden",)},
    "replicated",
    "zeros",
)
_KINDS = ("sliding_attention", "full_attention")


def _overrides(config: ConfigJson) -> Mapping[str, Any]:
    """What Gemma's config.json calls otherwise, has more of, or leaves out where transformers has a default."""
    layers, raw = config.get("num_hidden_layers", int, most=10_000), config.raw

    # Which layers are local. Earlier versions of transformers wrote only how often a layer is not.
    every = config.get("sliding_window_pattern", int, 6)
    kinds = config.get("layer_types", list, []) or [_KINDS[(i + 1) % every == 0] for i in range(layers)]
    # A guess for a missing layer would rotate it wrongly without any error.
    if len(kinds) != layers or not all(kind in _KINDS for kind in kinds):
        raise UserError(f"{config.where}: layer_types = {shown(kinds)}: must name {' or '.join(_KINDS)} for each layer")
    local = tuple(i for i, kind in enumerate(kinds) if kind == _KINDS[0])

    # The context as the model was trained; windows shorten it below.
    context = config.get("max_position_embeddings", int, 131072)

    # A rotation for each kind; earlier versions wrote them beside one another.
    ropes = config.get("rope_parameters", dict, {}) or {
        _KINDS[0]: {"rope_theta": raw.get("rope_local_base_freq")},
        _KINDS[1]: {"rope_theta": raw.get("rope_theta"), **config.get("rope_scaling", dict, {})},
    }
    of_local, of_full = (dict(ConfigJson(ropes, config.where).get(kind, dict, {})) for kind in _KINDS)

    # The base of full layers stands apart from the scaling, as in every other family.
    theta = positive(of_full.pop("rope_theta", None), 1e6, f"{config.where}: rope_theta of {_KINDS[1]}")
    # Local layers are never scaled; the others at most linearly.
    for kind, rope, supported in ((_KINDS[0], of_local, ("default",)), (_KINDS[1], of_full, ("default", "linear"))):
        older = rope.pop("type", None)  # an older name of the key
        if rope.setdefault("rope_type", older or "default") not in supported:
            raise UserError(f"{config.where}: rope_type = {shown(rope['rope_type'])} of {kind} is not supported")

    # The defaults are Gemma3TextConfig's.
    return {
        "head_dim": config.get("head_dim", int, 256, most=65_536),
        "tied": config.get("tie_word_embeddings", bool, True),
        "context": min(context, config.get("sliding_window", int, 4096)) if local else context,
        "rope_theta": theta,
        "rope_scaling": None if of_full["rope_type"] == "default" else of_full,  # of full layers
        "local_layers": local,
        "local_rope_theta": positive(of_local.get("rope_theta"), 1e4, f"{config.where}: rope_theta of {_KINDS[0]}"),
        "attention_scale": positive(raw.get("query_pre_attn_scalar"), 256.0, f"{config.where}: query_pre_attn_scalar")
        ** -0.5,  # not of head_dim
        "embedding_scale": config.get("hidden_size", int) ** 0.5,  # on the way in alone, not in the tied head
        "activation": "gelu_tanh",
    }


def _zero_centred(norm: Parameter) -> Parameter:
    """A norm that scales by 1 + weight."""
    return replace(norm, init="zeros")


FAMILY = ModelFamily(
    name="gemma3",
    architecture="Gemma3ForCausalLM",
    requires=(
        Requirement("hidden_activation", ("gelu_pytorch_tanh",), "only gelu_pytorch_tanh"),
        Requirement("attn_logit_softcapping", (None,), "scores are not capped"),
        Requirement("final_logit_softcapping", (None,), "logits are not capped"),
        Requirement("use_bidirectional_attention", (False, None), "only causal attention"),
        dense.UNQUANTISED,
        dense.NO_ATTENTION_BIAS,
        dense.WHOLE_HEAD_ROPE,
    ),
    layer=(
        _zero_centred(dense.ATTENTION_NORM),
        dense.QKV,
        _zero_centred(dense.Q_NORM),
        _zero_centred(dense.K_NORM),
        dense.ATTENTION_OUT,
        POST_ATTENTION_NORM,
        replace(
            _zero_centred(dense.MLP_NORM),
            hf={"pre_feedforward_layernorm.weight": ("hidden",)},
        ),
        dense.GATE_UP,
        dense.DOWN,
        POST_MLP_NORM,
    ),
    embedding=dense.EMBEDDING,
    final_norm=_zero_centred(dense.FINAL_NORM),
    head=dense.HEAD,
    overrides=_overrides,
)
