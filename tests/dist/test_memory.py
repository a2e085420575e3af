"""The memory plan against the bytes of the tensors after a step."""

from __future__ import annotations

import pytest
import tiny
import torch

from megatron_brorl.cli import memory_plan
from megatron_brorl.config.schema import LoraConfig
from megatron_brorl.families.shape import read_shape

TP_EP = {"tensor": 2, "sequence": True, "expert": 2}
FP32, BF16 = torch.float32, torch.bfloat16
# Ranks, layout, type of the weights, distributed optimizer, family, tied head, rank of adapters.
CASES = [
    (1, {}, FP32, False, "qwen2", False, 0),
    (1, {}, BF16, False, "qwen2", True, 8),
    (2, {"tensor": 2}, BF16, False, "qwen2", True, 0),
    (2, {"tensor": 2}, FP32, False, "qwen2", True, 8),
    (2, {"pipeline": 2}, FP32, False, "qwen2", True, 0),
    (2, {"pipeline": 2}, BF16, False, "qwen2", False, 8),
    (2, {"expert": 2}, FP32, False, "qwen3_moe", True, 0),
    (2, TP_EP, BF16, True, "qwen2_moe", False, 0),
    (4, {"expert": 2}, BF16, True, "qwen3_moe", True, 0),
    (4, {"expert": 2, "pipeline": 2}, BF16, False, "qwen3_moe", True, 0),
]


@pytest.mark.parametrize(("size", "parallel", "dtype", "distributed", "family", "tied", "rank"), CASES)
def test_bytes_are_those_of_the_tensors(worlds, tmp_path, size, parallel, dtype, distributed, family, tied, rank):
    tiny.make_model(tmp_path, family, tied)
    shape = read_shape(tmp_path)
    lora = LoraConfig(rank=rank) if rank else None
    options = {"dtype": dtype, "lora": lora, "distributed_optimizer": distributed}
    for stage, measured in worlds(size).run("jobs:training_bytes", str(tmp_path), parallel, options):
        tensor, pipeline, expert = (parallel.get(name, 1) for name in ("tensor", "pipeline", "expert"))
        shards = size // (tensor * pipeline) if distributed else 1
        expert_shards = size // (pipeline * expert) if distributed else 1
        parts = memory_plan.training_parts(shape, stage, tensor, pipeline, dtype, expert, shards, expert_shards, lora)
        assert measured == pytest.approx(sum(parts.values()), rel=0.01)
