"""Parameter names and layouts against mbridge, an independent converter between Megatron and Hugging Face."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest
import tiny
import torch
from transformers import AutoConfig

from megatron_brorl.families.shape import read_shape
from megatron_brorl.models.gpt import padded_vocab
from megatron_brorl.models.weights.layouts import local_shape, to_hf, to_local
from megatron_brorl.models.weights.names import entries, hf_shapes

mbridge = pytest.importorskip("mbridge", reason="mbridge is part of the test extra of pyproject.toml")
BRIDGES = {"llama": "LLaMABridge", "qwen2": "Qwen2Bridge", "qwen3": "Qwen3Bridge"}  # the bridges of text models


def bridge(config, tensor: int):
    """Return mbridge's converter of this model, without its model description, which needs Transformer Engine."""
    from mbridge.core.parallel_states import ParallelStates

    base = getattr(import_module(f"mbridge.models.{config.model_type}"), BRIDGES[config.model_type])

    class Converter(base):
        _DIRECT_MAPPING = dict(base._DIRECT_MAPPING)  # noqa: RUF012  a tied model would change it for the whole class

        def _build_config(self):
            return SimpleNamespace(gated_linear_unit=True)

    made = Converter(config, torch.float32, ParallelStates(tp_size=tensor), tensor)
    made.vocab_size, made.padded_vocab_size = config.vocab_size, padded_vocab(config.vocab_size, tensor)
    return made


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize(("family", "tied"), [c for c in tiny.CASES if c[0] in BRIDGES])
def test_names_and_shards_equal_mbridge(tmp_path, family, tied, tensor):
    model = tiny.make_model(tmp_path, family, tied, num_key_value_heads=4, num_attention_heads=8)
    shape = read_shape(tmp_path)
    other = bridge(AutoConfig.from_pretrained(tmp_path), tensor)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    seen = []
    for entry in entries(shape, 1, te_names=True):
        assert list(entry.hf) == other._weight_name_mapping_mcore_to_hf(entry.megatron)
        seen += entry.hf
        full = [weights[name] for name in entry.hf]
        whole = other._weight_to_mcore_format(entry.megatron, full)
        like = torch.empty(local_shape(entry, tensor))
        theirs = other._weight_split_across_tp(entry.megatron, whole, like, tensor)
        ours = [to_local(entry, full, shape.kv_heads, rank, tensor) for rank in range(tensor)]
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        like.tensor_model_parallel = True
        like.partition_dim = 1 if entry.layout == "columns" else 0
        merged = whole
        if entry.layout != "whole":
            merged = other._weight_merge_across_tp(entry.megatron, [x.contiguous() for x in theirs], like)
        names, tensors = other._weight_to_hf_format(entry.megatron, merged)
        back = to_hf(entry, [x.contiguous() for x in theirs], shape.kv_heads)
        assert names == list(entry.hf)
        assert all(torch.equal(a, b) for a, b in zip(back, tensors, strict=True))
    assert sorted(seen) == sorted(hf_shapes(shape))
    assert set(seen) == set(weights)
