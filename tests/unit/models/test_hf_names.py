"""Reading and writing sharded Hugging Face checkpoints; an incomplete directory never appears."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from random_model import write_random_model
from transformers import AutoModelForCausalLM

from megatron_brorl.checkpoints import hugging_face, safetensors_files
from megatron_brorl.errors import UserError
from megatron_brorl.families.shape import parse_shape, read_shape
from megatron_brorl.models.gpt import build_actor
from megatron_brorl.models.weights.names import entries, global_parameters
from megatron_brorl.models.weights.stream import make_buckets, stream
from megatron_brorl.ops.backend import backend


def load(directory, processes):
    shape = read_shape(directory)
    actor = build_actor(shape, processes, torch.float32, backend("fused", torch.device("cpu")))
    hugging_face.load(actor, shape, directory)
    return stream(
        make_buckets(entries(shape, 1), 4), shape.kv_heads, global_parameters(actor), processes, torch.float32
    )


@pytest.mark.parametrize("tied", [False, True])
def test_sharded_checkpoints_are_read_and_written(processes, tmp_path, monkeypatch, tied):
    model = tiny.make_model(tmp_path / "in", "qwen3", tied)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    monkeypatch.setattr(safetensors_files, "MAX_SHARD_BYTES", 50_000)
    hugging_face.save(load(tmp_path / "sharded", processes), tmp_path / "sharded", tmp_path / "out", "float32")
    written = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(written) > 3
    assert written[0] == f"model-00001-of-{len(written):05d}.safetensors"
    index = json.loads((tmp_path / "out" / hugging_face.INDEX).read_text())
    assert set(index["weight_map"].values()) == set(written)
    assert index["metadata"]["total_size"] == 4 * sum(p.numel() for p in model.parameters())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())


def test_missing_shard_is_named(processes, tmp_path):
    tiny.make_model(tmp_path / "in", "llama", False).save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    lost = sorted((tmp_path / "sharded").glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(UserError, match=f"{lost.name}: missing"):
        list(load(tmp_path / "sharded", processes))


def test_wrong_shape_is_named(processes, tmp_path):
    tiny.make_model(tmp_path, "llama", False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(UserError, match=r"gate_proj\.weight has shape \[88, 48\], config.json implies \[96, 48\]"):
        list(load(tmp_path, processes))


def test_failed_save_leaves_the_old_directory(processes, tmp_path):
    model = tiny.make_model(tmp_path / "in", "llama", False)
    hugging_face.save(load(tmp_path / "in", processes), tmp_path / "in", tmp_path / "out", "float32")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()

    def broken():
        yield "model.embed_tokens.weight", torch.zeros(tiny.VOCAB, 48)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        hugging_face.save(broken(), tmp_path / "in", tmp_path / "out", "float32")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    doubled = ((name, 2 * tensor) for name, tensor in load(tmp_path / "in", processes))
    hugging_face.save(doubled, tmp_path / "in", tmp_path / "out", "float32")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.model.norm.weight, 2 * model.model.norm.weight)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


def test_random_model_loads_in_transformers(tmp_path):
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "vocab_size": 300,
    }
    count = write_random_model(config, tmp_path, seed=3)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert count == sum(p.numel() for p in model.parameters())
    assert parse_shape(config, "here").layers == 8
    weights = dict(model.named_parameters())
    assert weights["model.embed_tokens.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert weights["model.layers.0.mlp.down_proj.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert torch.equal(weights["model.norm.weight"], torch.ones(64))
    assert torch.count_nonzero(weights["model.layers.0.self_attn.q_proj.bias"]) == 0
