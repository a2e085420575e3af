"""Reading config.json, and refusing what the project cannot train."""

from __future__ import annotations

import json

import pytest
import tiny

from megatron_brorl.checkpoints.hugging_face import Checkpoint
from megatron_brorl.errors import UserError
from megatron_brorl.families.shape import parse_shape, read_shape
from megatron_brorl.models.weights.names import hf_shapes


@pytest.mark.parametrize(("family", "tied"), tiny.CASES)
def test_shapes_equal_those_transformers_writes(tmp_path, family, tied):
    model = tiny.make_model(tmp_path, family, tied)
    shape = read_shape(tmp_path)
    assert (shape.family, shape.tied, shape.norm_eps, shape.context) == (family, tied, 1e-5, 256)
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}  # named_parameters lists ties once
    assert hf_shapes(shape) == expected
    Checkpoint(tmp_path).check(hf_shapes(shape))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architecture 'MixtralForCausalLM' is not supported"),
        ({"architectures": None}, "architecture None is not supported"),
        ({"hidden_size": "48"}, "hidden_size = '48': must be of type int"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0: must be at least 1"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 is not a multiple of num_key_value_heads = 3"),
    ],
)
def test_refusals_name_file_and_key(tmp_path, change, message):
    tiny.make_model(tmp_path, "qwen2", True)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError) as caught:
        read_shape(tmp_path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_what_qwen2_says_of_attention_bias_does_not_matter(tmp_path):
    """transformers' Qwen2 always has a bias of queries, keys and values, and never one of the output."""
    tiny.make_model(tmp_path, "qwen2", True)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert parse_shape(raw | {"attention_bias": False}, "") == parse_shape(raw | {"attention_bias": True}, "")
    assert parse_shape(raw, "").qkv_bias


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


def test_checkpoint_that_does_not_fit_is_refused(tmp_path):
    tiny.make_model(tmp_path, "llama", False)
    shapes = hf_shapes(read_shape(tmp_path))
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(UserError, match=r"1 tensors of config.json's model are missing, for example model.extra"):
        checkpoint.check({**shapes, "model.extra": (1,)})
    with pytest.raises(UserError, match=r"unknown tensor model\.norm\.weight"):
        checkpoint.check({n: s for n, s in shapes.items() if n != "model.norm.weight"})
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:1000])
    with pytest.raises(UserError, match="not a readable safetensors file"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match="holds neither"):
        Checkpoint(tmp_path)
