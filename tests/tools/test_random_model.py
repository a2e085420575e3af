"""A random model loads in transformers, and its weights have the standard deviations of write_random_model."""

from __future__ import annotations

import pytest
import torch
from random_model import qwen2_config, write_random_model
from transformers import AutoModelForCausalLM


def test_weights_of_a_random_model(tmp_path):
    sizes = {"hidden": 64, "layers": 8, "heads": 4, "kv_heads": 2, "ffn": 96, "vocab": 300, "context": 64}
    count = write_random_model(qwen2_config(**sizes), tmp_path, seed=3)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert count == sum(p.numel() for p in model.parameters())
    weights = dict(model.named_parameters())
    assert weights["model.embed_tokens.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    # Divided by the root of the number of residual additions: two in each of the eight layers.
    assert weights["model.layers.0.mlp.down_proj.weight"].std().item() == pytest.approx(0.02 / 16**0.5, rel=0.05)
    assert torch.equal(weights["model.norm.weight"], torch.ones(64))
    assert torch.count_nonzero(weights["model.layers.0.self_attn.q_proj.bias"]) == 0
