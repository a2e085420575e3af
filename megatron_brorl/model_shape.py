"""The shape of a model, read from a Hugging Face config.json (dense Llama, Qwen2 and Qwen3)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_brorl.errors import UserError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"  # the one file of a checkpoint that is not sharded
FAMILIES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}


@dataclass(frozen=True)
class ModelShape:
    """What both the Megatron actor and the rollout engine need to know of an architecture."""

    family: str  # "llama", "qwen2" or "qwen3"
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int  # max_position_embeddings
    norm_eps: float
    tied: bool  # the LM head is the embedding
    qkv_bias: bool
    qk_norm: bool
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None  # the rope_scaling object, with "rope_type"
    init_std: float


def read_shape(directory: str | Path) -> ModelShape:
    """Read `directory`/config.json. Raises UserError where it is missing or describes an unsupported model."""
    path = Path(directory) / CONFIG
    if not Path(directory).is_dir():
        raise UserError(f"{directory}: no such Hugging Face directory (model.path)")
    if not path.is_file():
        raise UserError(f"{path}: missing; a Hugging Face directory holds config.json, *.safetensors and a tokenizer")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise UserError(f"{path}: not valid JSON: {e}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: must hold a JSON object")
    return parse_shape(raw, str(path))


def parse_shape(raw: Mapping[str, Any], where: str) -> ModelShape:
    """Turn the content of a config.json into a ModelShape. Raises UserError naming the key that does not fit."""
    architecture = (raw.get("architectures") or [None])[0]
    if architecture not in FAMILIES:
        raise UserError(f"{where}: architecture {architecture!r} is not supported; supported: {', '.join(FAMILIES)}")
    family = FAMILIES[architecture]

    def get(key: str, kind: type, default: Any = None) -> Any:
        value = raw.get(key)
        value = default if value is None else value
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise UserError(f"{where}: {key} = {value!r}: must be of type {kind.__name__}")
        return value

    def refuse(bad: Any, key: str, why: str) -> None:
        if bad:
            raise UserError(f"{where}: {key} = {raw.get(key)!r} is not supported: {why}")

    refuse(raw.get("hidden_act", "silu") != "silu", "hidden_act", "only silu")
    refuse(raw.get("use_sliding_window", False), "use_sliding_window", "only full attention")
    refuse(raw.get("mlp_bias", False), "mlp_bias", "no dense family here has one")
    refuse(raw.get("quantization_config"), "quantization_config", "train from an unquantised checkpoint")
    refuse(family != "qwen2" and raw.get("attention_bias", False), "attention_bias", "an output bias is not mapped")
    refuse(raw.get("partial_rotary_factor", 1.0) != 1.0, "partial_rotary_factor", "RoPE covers the whole head")

    hidden, heads = get("hidden_size", int), get("num_attention_heads", int)
    # Transformers 5 writes one rope_parameters object; earlier versions rope_theta beside rope_scaling.
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = float(rope.pop("rope_theta", raw.get("rope_theta") or 10000.0))
    rope_type = rope.pop("type", None)
    rope.setdefault("rope_type", rope_type or "default")
    shape = ModelShape(
        family=family,
        layers=get("num_hidden_layers", int),
        hidden=hidden,
        heads=heads,
        kv_heads=get("num_key_value_heads", int, heads),
        head_dim=get("head_dim", int, 128 if family == "qwen3" else hidden // heads),
        ffn=get("intermediate_size", int),
        vocab=get("vocab_size", int),
        context=get("max_position_embeddings", int),
        norm_eps=get("rms_norm_eps", float, 1e-6),
        tied=get("tie_word_embeddings", bool, False),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        rope_theta=theta,
        rope_scaling=None if rope["rope_type"] == "default" else rope,
        init_std=get("initializer_range", float, 0.02),
    )
    if shape.heads % shape.kv_heads:
        raise UserError(
            f"{where}: num_attention_heads = {heads} is not a multiple of num_key_value_heads = {shape.kv_heads}"
        )
    return shape
