"""The memory that training is said to need against what is there after a step."""

from __future__ import annotations

import pytest
import tiny
import torch
from random_model import qwen2_config

from megatron_brorl.config.schema import ParallelConfig
from megatron_brorl.errors import UserError
from megatron_brorl.model_shape import parse_shape, read_shape
from megatron_brorl.models import memory
from megatron_brorl.parallel import grid


@pytest.mark.parametrize(
    ("size", "parallel", "dtype"),
    [
        (1, {}, torch.float32),
        (1, {}, torch.bfloat16),
        (2, {"tensor": 2}, torch.bfloat16),
        (2, {"pipeline": 2}, torch.float32),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_bytes_are_those_of_the_tensors(worlds, tmp_path, size, parallel, dtype, tied):
    tiny.make_model(tmp_path, "qwen2", tied)
    shape = read_shape(tmp_path)
    for stage, found in worlds(size).run("jobs:training_bytes", str(tmp_path), parallel, dtype):
        layout = parallel.get("tensor", 1), parallel.get("pipeline", 1)
        assert found == pytest.approx(memory.training_bytes(shape, stage, *layout, dtype), rel=0.01)


def test_zero_1_cuts_moments_and_masters():
    """Bytes per parameter in bf16: weight 2, gradient 4, master 4, moments 8, of which the last two are cut."""
    sizes = {"hidden": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "ffn": 8960, "vocab": 151936, "context": 131072}
    shape = parse_shape(qwen2_config(**sizes), "test")
    whole, cut = (memory.training_bytes(shape, 0, 1, 1, torch.bfloat16, n) for n in (1, 64))
    assert cut / whole == pytest.approx((6 + 12 / 64) / 18, rel=1e-6)


def test_a_model_that_does_not_fit_is_refused(tmp_path, monkeypatch):
    tiny.make_model(tmp_path, "qwen2", False)
    shape, alone = read_shape(tmp_path), grid.build(ParallelConfig())
    need = memory.training_bytes(shape, 0, 1, 1, torch.bfloat16)
    monkeypatch.setattr(memory.device, "on_gpu", lambda: True)
    monkeypatch.setattr(memory.device, "default_device", lambda: torch.device("cuda", 0))
    for have in (need, need - 1):
        properties = type("Properties", (), {"total_memory": have})()
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, p=properties: p)
        if have == need:
            memory.check(shape, alone, torch.bfloat16, False)
        else:
            with pytest.raises(UserError, match=r"or parallel\.distributed_optimizer = true"):
                memory.check(shape, alone, torch.bfloat16, False)
    grid.leave()
