"""Tests of read_shape against the configuration that transformers resolves, in every form that it accepts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron_brorl.errors import UserError
from megatron_brorl.families.shape import parse_shape, read_shape
from megatron_brorl.ops.rope import inverse_frequencies

SIZES = {
    "vocab_size": 103,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
PLAIN = {"rope_type": "default", "rope_theta": 5e5}


# Rotary embeddings of families with equal layers. Several cases state a value in more than one place.
ROPES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "theta alone": {"rope_theta": 777.0},
    "parameters": {"rope_parameters": PLAIN},
    "parameters without theta": {"rope_parameters": LINEAR, "rope_theta": 777.0},
    "plain type and older yarn": {"rope_scaling": {**YARN, "rope_type": "default", "type": "yarn"}},
    "llama3 and plain parameters": {"rope_scaling": LLAMA3, "rope_parameters": PLAIN},
    "llama3, original context outside": {"rope_parameters": LLAMA3, "original_max_position_embeddings": 128},
    "yarn, no original context": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
    "yarn with scales": {"rope_scaling": {**YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}},
    "yarn with an attention factor": {"rope_scaling": {**YARN, "attention_factor": 1.25}},
    "yarn with betas": {"rope_scaling": {**YARN, "beta_fast": 16, "beta_slow": 2}},
    "yarn with reversed betas": {"rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 8}},
    "yarn without rounding": {"rope_scaling": {**YARN, "truncate": False}},
    "yarn of a context of one wave": {"rope_scaling": {**YARN, "original_max_position_embeddings": 6}},
    "whole rotation": {"partial_rotary_factor": 1.0, "rope_scaling": {**LINEAR, "partial_rotary_factor": 1.0}},
}
# Keys that all of these families have. ABSENT removes a key, so that the default of the family applies.
ABSENT = object()
KEYS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "no kv heads": {"num_key_value_heads": ABSENT, "num_attention_heads": 64, "hidden_size": 1024, "head_dim": 16},
    "null kv heads": {"num_key_value_heads": None},
    "head_dim": {"head_dim": 32},
    "eps": {"rms_norm_eps": 1e-5},
}
GEMMA: dict[str, dict[str, Any]] = {
    "nothing": {},
    "no kv heads": {"num_key_value_heads": ABSENT},
    "no head_dim": {"head_dim": ABSENT},
    "untied": {"tie_word_embeddings": False},
    "older": {"rope_theta": 7e5, "rope_local_base_freq": 300.0, "rope_scaling": LINEAR, "sliding_window_pattern": 2},
    "parameters": {"rope_parameters": {"full_attention": {**LINEAR, "rope_theta": 5e5}}},
    "parameters and scaling": {
        "rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN},
        "rope_scaling": LINEAR,
    },
    "window": {"sliding_window": 128, "query_pre_attn_scalar": 24},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a model of the hub": {"num_experts": 16, "num_experts_per_tok": 1, "norm_topk_prob": False},
    "a model of transformers 5": {"num_local_experts": 16, "norm_topk_prob": True, "mlp_only_layers": []},
    "sizes": {"moe_intermediate_size": 40, "num_attention_heads": 16, "head_dim": 32, "num_key_value_heads": ABSENT},
}
CASES = [
    *((kind, f"rope: {name}") for kind in ("llama", "qwen2", "qwen3") for name in ROPES),
    *((kind, f"key: {name}") for kind in ("llama", "qwen2", "qwen3") for name in KEYS),
    *(("gemma3_text", f"gemma: {name}") for name in GEMMA),
    *(("qwen3_moe", f"experts: {name}") for name in EXPERTS),
    *(("qwen2_moe", f"experts: {name}") for name in EXPERTS),
]
TABLES = {"rope": ROPES, "key": KEYS, "gemma": GEMMA, "experts": EXPERTS}


def write(directory: Path, kind: str, changes: dict[str, Any]) -> dict[str, Any]:
    raw = {"architectures": [CLASSES[kind]], "model_type": kind, **SIZES, **changes}
    if kind == "gemma3_text":
        raw["num_hidden_layers"] = 6  # every sixth layer has full attention
    raw = {key: value for key, value in raw.items() if value is not ABSENT}
    (directory / "config.json").write_text(json.dumps(raw))
    return raw


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_shape_equals_what_transformers_resolves(tmp_path, kind, name):
    table, _, case = name.partition(": ")
    write(tmp_path, kind, TABLES[table][case])
    resolved = AutoConfig.from_pretrained(tmp_path)
    shape = read_shape(tmp_path)
    is_gemma = kind == "gemma3_text"

    heads = resolved.num_attention_heads
    hidden = resolved.hidden_size
    max_positions = resolved.max_position_embeddings
    expected = {
        "layers": resolved.num_hidden_layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": resolved.num_key_value_heads,
        "head_dim": getattr(resolved, "head_dim", None) or hidden // heads,
        "ffn": getattr(resolved, "moe_intermediate_size", resolved.intermediate_size),
        "experts": getattr(resolved, "num_experts", 0),
        "chosen_experts": getattr(resolved, "num_experts_per_tok", 0),
        "norm_topk_prob": getattr(resolved, "norm_topk_prob", False),
        "shared_ffn": getattr(resolved, "shared_expert_intermediate_size", 0),
        "vocab": resolved.vocab_size,
        "context": min(max_positions, resolved.sliding_window) if is_gemma else max_positions,
        "norm_eps": resolved.rms_norm_eps,
        "tied": resolved.tie_word_embeddings,
        "init_std": resolved.initializer_range,
    }
    assert {key: getattr(shape, key) for key in expected} == expected

    if is_gemma:
        embedding = Gemma3RotaryEmbedding(resolved)
        pairs = [
            (shape, embedding.full_attention_inv_freq, embedding.full_attention_attention_scaling),
            (
                shape.of_local_layers,
                embedding.sliding_attention_inv_freq,
                embedding.sliding_attention_attention_scaling,
            ),
        ]
        assert shape.local_layers == tuple(
            i for i, layer_type in enumerate(resolved.layer_types) if layer_type == "sliding_attention"
        )
        assert shape.attention_scale == resolved.query_pre_attn_scalar**-0.5
    else:
        embedding = LlamaRotaryEmbedding(resolved)  # the same in Qwen2 and Qwen3
        pairs = [(shape, embedding.inv_freq, embedding.attention_scaling)]
    for rotated, inv_freq, scale in pairs:
        frequencies, factor = inverse_frequencies(rotated)
        torch.testing.assert_close(frequencies, inv_freq, rtol=1e-6, atol=0)
        assert factor == pytest.approx(scale, rel=1e-12)


# Settings that would change the computation and are not supported.
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rope_parameters": LONGROPE}, 'rope_parameters.rope_type = "longrope"'),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"use_sliding_window": True, "sliding_window": 16}, "use_sliding_window = true"),
    ({"hidden_act": "gelu"}, 'hidden_act = "gelu"'),
    ({"transformers_weights": "other.safetensors"}, "transformers_weights"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
]


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        *((kind, *refused) for kind in ("llama", "qwen2", "qwen3") for refused in REFUSED),
        *((kind, {"attention_bias": True}, "attention_bias = true") for kind in ("llama", "qwen3", "gemma3_text")),
        ("llama", {"mlp_bias": True}, "mlp_bias = true"),
        ("gemma3_text", {"hidden_activation": "silu"}, 'hidden_activation = "silu" is not supported'),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention = true"),
        ("gemma3_text", {"layer_types": ["full_attention"]}, "must name sliding_attention or full_attention for each"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers = [1] is not supported: every layer must have"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2 is not supported"),
        ("qwen2_moe", {"mlp_only_layers": [1]}, "mlp_only_layers = [1] is not supported: every layer must have"),
        ("qwen2_moe", {"qkv_bias": False}, "qkv_bias = false is not supported"),
        ("qwen3_moe", {"num_experts": 4}, "num_experts_per_tok = 8 is more than the 4 experts"),
        ("qwen3_moe", {"norm_topk_prob": True, "num_experts_per_tok": 1}, "the router has no effect"),
        ("gemma3_text", {"rope_scaling": YARN}, 'full_attention.rope_type = "yarn"'),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": LINEAR}}, 'sliding_attention.rope_type = "linear"'),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {**PLAIN, "partial_rotary_factor": 0.5}}},
            "partial_rotary_factor",
        ),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("gemma3_text", {"model_type": "gemma2"}, 'model_type = "gemma2"'),
        ("gemma3_text", {"text_config": SIZES}, "text_config"),
        ("qwen2", {"architectures": ["MixtralForCausalLM"]}, 'architecture "MixtralForCausalLM" is not supported'),
        ("qwen2", {"architectures": None}, "architecture null is not supported"),
        ("qwen2", {"hidden_size": "48"}, 'hidden_size = "48": must be of type int'),
        ("qwen2", {"num_attention_heads": 0}, "num_attention_heads = 0: must be at least 1"),
        ("qwen2", {"num_key_value_heads": 3}, "num_attention_heads = 4 is not a multiple of num_key_value_heads = 3"),
    ],
)
def test_unsupported_configurations_are_refused(tmp_path, kind, changes, message):
    write(tmp_path, kind, changes)
    with pytest.raises(UserError) as error:
        read_shape(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert message in str(error.value)


def test_a_scaling_without_one_of_its_keys_is_refused(tmp_path):
    scaling = {key: value for key, value in LLAMA3.items() if key != "low_freq_factor"}
    write(tmp_path, "llama", {"rope_scaling": scaling})
    with pytest.raises(UserError, match="lacks the key 'low_freq_factor'"):
        inverse_frequencies(read_shape(tmp_path))


def test_attention_bias_of_qwen2_is_ignored(tmp_path):
    """transformers' Qwen2 always has biases for queries, keys and values, and never one for the output."""
    tiny.make_model(tmp_path, "qwen2", tied=True)
    raw = json.loads((tmp_path / "config.json").read_text())
    without, with_bias = (parse_shape(raw | {"attention_bias": bias}, where="") for bias in (False, True))
    assert without == with_bias
    assert parse_shape(raw, where="").qkv_bias


def test_missing_directory_and_broken_json(tmp_path):
    with pytest.raises(UserError, match="no such Hugging Face directory"):
        read_shape(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"config\.json: missing"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        read_shape(tmp_path)
    with pytest.raises(UserError, match="must be of type int"):
        parse_shape({"architectures": ["LlamaForCausalLM"]}, "config.json")


def test_an_adapter_is_refused_with_the_way_to_merge_it(tmp_path):
    """PEFT writes the adapter. The way to merge it that the message names gives a directory that is accepted."""
    base, adapter, merged = (tmp_path / name for name in ("base", "adapter", "merged"))
    tiny.make_model(base, "qwen2", tied=False)
    model = AutoModelForCausalLM.from_pretrained(base)
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(adapter)
    peft.AutoPeftModelForCausalLM.from_pretrained(adapter).merge_and_unload().save_pretrained(merged)
    shutil.copy(adapter / "adapter_config.json", merged)  # A model next to an adapter is read.
    assert read_shape(merged) == read_shape(base)
    for _ in range(2):
        with pytest.raises(UserError, match=r"^[^\n]*adapter: is a PEFT adapter of .*base.*merge_and_unload.*teacher"):
            read_shape(adapter, "teacher.path")
        shutil.copy(base / "config.json", adapter)  # The second time, the adapter has a config.json.
