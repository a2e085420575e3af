"""Checks of FP8 settings against the device, before a model is built."""

from __future__ import annotations

import dataclasses

import pytest
from megatron.core.transformer import TransformerConfig
from random_model import qwen2_config

from megatron_brorl.config.schema import Fp8Config
from megatron_brorl.errors import UserError
from megatron_brorl.families.shape import ModelShape, parse_shape
from megatron_brorl.models import fp8

H100, B200, L40, A100 = (9, 0), (10, 0), (8, 9), (8, 0)  # compute capabilities


def shape(**changes: int) -> ModelShape:
    """Return the shape of DeepSeek-R1-Distill-Qwen-1.5B, with changes."""
    sizes = {"hidden": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "ffn": 8960, "vocab": 151936, "context": 131072}
    return parse_shape(qwen2_config(**{**sizes, **changes}), "test")


@pytest.mark.parametrize(
    ("recipe", "capability", "cuda", "te", "message"),
    [
        ("delayed", H100, "12.4", "2.9.0", ""),
        ("tensorwise", L40, "12.4", "2.11", ""),
        ("blockwise", H100, "12.9", "2.9.0+abc", ""),
        ("blockwise", H100, "13.0", "2.20.2", ""),
        ("mxfp8", B200, "13.0", "2.9", ""),
        ("delayed", A100, "12.9", "2.9", "compute capability 8.9 (this GPU: 8.0)"),
        ("blockwise", H100, "12.8", "2.9", "CUDA 12.9 (here: 9.0 and 12.8): use 'tensorwise'"),
        ("blockwise", L40, "12.9", "2.9", "compute capability 9.0"),
        ("mxfp8", H100, "13.0", "2.9", "H100 and H200 have 9.0): use 'blockwise'"),
        ("tensorwise", H100, "12.9", "2.8.1", "Transformer Engine 2.8.1 is too old: install 2.9"),
    ],
)
def test_devices_and_versions(recipe, capability, cuda, te, message):
    problem = fp8.problem(Fp8Config(recipe=recipe), shape(), tp_size=1, capability=capability, cuda=cuda, te=te)
    assert message in problem
    assert bool(message) == bool(problem)


def test_every_shard_must_be_aligned():
    def problem(config, model_shape, tp_size=1):
        return fp8.problem(config, model_shape, tp_size, B200, cuda="13.0", te="2.9")

    config = Fp8Config(recipe="tensorwise", bf16_layers=2)
    assert problem(config, shape(), tp_size=2) == ""
    assert "intermediate_size is 4484" in problem(config, shape(ffn=8968), tp_size=2)
    assert "hidden_size is 1540" in problem(config, shape(hidden=1540, heads=11, kv_heads=1))
    only_16 = shape(ffn=8976)  # 16 x 561, not a multiple of 32
    assert problem(Fp8Config(recipe="tensorwise"), only_16) == ""
    assert "8976, not a multiple of 32" in problem(Fp8Config(recipe="mxfp8"), only_16)
    assert "leaves none of the 4 layers" in problem(config, shape(layers=4))


def test_megatron_knows_every_field():
    fields = {f.name: f for f in dataclasses.fields(TransformerConfig)}
    for recipe in ("delayed", "tensorwise", "blockwise", "mxfp8"):
        options = fp8.settings(Fp8Config(recipe=recipe, bf16_layers=0 if recipe == "delayed" else 1))
        assert options.keys() <= fields.keys()
        config = TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=4, bf16=True, **options)
        assert config.tp_only_amax_red  # replicas have different numbers of micro-batches
    assert fp8.settings(Fp8Config()) == {}


def test_fp8_is_refused_without_transformer_engine():
    if fp8.cpu_bridge.has_transformer_engine():
        pytest.skip("Transformer Engine is here")
    with pytest.raises(UserError, match=r'fp8\.recipe = "delayed": needs a GPU and Transformer Engine'):
        fp8.check(Fp8Config(recipe="delayed"), shape(), tp_size=1)
