"""Checkpoints of adapters converted to merged weights, against products in float64."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest
import tiny
import torch
from conversions import save_checkpoint, to_hf, weights

from megatron_brorl.checkpoints import convert, hugging_face
from megatron_brorl.checkpoints.model_state import ModelState
from megatron_brorl.config.schema import LoraConfig, OptimConfig, ParallelConfig
from megatron_brorl.errors import UserError
from megatron_brorl.families.shape import read_shape
from megatron_brorl.ops.backend import backend
from megatron_brorl.parallel import grid
from megatron_brorl.train.worker import StageOptions, Worker

LORA = LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))


def make_run(root, family, dtype, moved):
    """Return a base model, a worker whose factors b of the layers `moved` are random, and its checkpoint."""
    base = root / "hf"
    tiny.make_model(base, family, True)
    options = StageOptions(100, backend("fused", torch.device("cpu")), dtype, lora=LORA)
    # convert.verify leaves the grid.
    worker = Worker(read_shape(base), grid.build(ParallelConfig()), options, OptimConfig())
    worker.load_hf(base)
    with torch.no_grad():
        for name, parameter in worker.actor.named_parameters():
            if name.endswith(".b") and moved in name:
                parameter.normal_(0, 0.1)
    sha256 = hashlib.sha256((base / "model.safetensors").read_bytes()).hexdigest()
    fingerprint = {"lora": dataclasses.asdict(LORA), "inputs": {"base_weights": sha256}}
    state = ModelState("", worker.actor, worker.optimizer)
    return base, worker, save_checkpoint(root / "checkpoints", 1, state, run={"fingerprint": fingerprint})


@pytest.mark.parametrize(
    ("family", "dtype", "error"),
    [("qwen2", torch.float32, 1e-6), ("gemma3", torch.float32, 1e-6), ("qwen3", torch.bfloat16, 2**-8)],
)
def test_merged_weights_of_a_checkpoint(tmp_path, family, dtype, error):
    """Relative errors are at most one rounding of the type of the run. Logits are equal to 1e-4."""
    base, worker, saved = make_run(tmp_path, family, dtype, "layers")
    adapters = {name: tensor.double() for name, tensor in worker.adapter_tensors()}
    to_hf(saved, tmp_path / "back", config=base)

    merged, before = weights(tmp_path / "back"), weights(base)
    assert merged.keys() == before.keys()
    for name, weight in before.items():
        expected = weight.to(dtype).double()
        if name.split(".")[-2] in LORA.targets and name.endswith("weight"):
            a, b = (adapters[f"base_model.model.{name.replace('weight', f'lora_{x}.weight')}"] for x in "AB")
            expected += 2 * b @ a
        assert merged[name].dtype == dtype
        assert ((merged[name].double() - expected).abs() <= error * expected.abs() + 1e-7).all(), name

    source, shape, _ = convert.open_megatron(saved, base)
    convert.verify(saved, tmp_path / "back", shape, merged=source)


def test_verify_detects_an_adapter_that_is_not_merged(tmp_path):
    base, _, saved = make_run(tmp_path, "llama", torch.float32, "layers.2.mlp.linear_fc2")
    source, shape, _ = convert.open_megatron(saved, base)
    with pytest.raises(UserError, match="its logits differ from those of"):
        convert.verify(saved, base, shape, merged=source)


def test_the_hash_of_a_sharded_model(tmp_path):
    tiny.make_model(tmp_path / "one", "llama", False).save_pretrained(tmp_path / "hf", max_shard_size="80KB")
    shards = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert len(shards) > 1
    expected = hashlib.sha256(b"".join(path.read_bytes() for path in shards)).hexdigest()
    assert hugging_face.weights_sha256(tmp_path / "hf") == expected
