"""Rotary frequencies of every supported scaling against transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from megatron_brorl.errors import UserError
from megatron_brorl.families.shape import parse_shape
from megatron_brorl.ops import rope

SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "beta_fast": 16,
        "beta_slow": 2,
    },
}


def config(scaling: dict, **overrides):
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=11,
        hidden_size=128,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=8,
        num_hidden_layers=1,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": 5000.0, **scaling},
        **overrides,
    )


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_rotation_equal_transformers(name):
    reference = config(SCALINGS[name])
    embedding = LlamaRotaryEmbedding(reference)
    inv_freq, factor = rope.inverse_frequencies(parse_shape(reference.to_dict(), name))
    torch.testing.assert_close(inv_freq, embedding.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(embedding.attention_scaling, rel=1e-12)

    positions = torch.arange(200)
    x = torch.randn(1, 2, 200, 64, generator=torch.Generator().manual_seed(0))
    expected, _ = apply_rotary_pos_emb(x, x, *embedding(x, positions[None]))
    angle = rope.angles(positions, inv_freq)
    got = rope.rotate(x, angle.cos() * factor, angle.sin() * factor)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=5e-5)


def test_older_rope_scaling_key_means_the_same():
    new = config(SCALINGS["linear"]).to_dict()
    old = {k: v for k, v in new.items() if k != "rope_parameters"}
    old |= {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    first, second = (rope.inverse_frequencies(parse_shape(c, "config.json"))[0] for c in (new, old))
    assert torch.equal(first, second)


def test_scaling_without_fixed_frequencies_is_refused():
    raw = config({"rope_type": "default"}).to_dict()
    raw["rope_parameters"] = {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}
    with pytest.raises(UserError, match='"dynamic" is not supported'):
        rope.inverse_frequencies(parse_shape(raw, "config.json"))
    raw["rope_parameters"] = {"rope_theta": 1e4, "rope_type": "llama3", "factor": 2.0}
    with pytest.raises(UserError, match="lacks the key 'low_freq_factor'"):
        rope.inverse_frequencies(parse_shape(raw, "config.json"))
