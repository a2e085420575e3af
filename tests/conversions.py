"""Checkpoints and their conversions, a published configuration, and the peak memory of a conversion."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import tiny
import torch

from megatron_brorl.checkpoints import convert
from megatron_brorl.checkpoints import training as checkpoint
from megatron_brorl.checkpoints.model_state import ModelState


def quiet(_done: int, _name: str) -> None:
    pass


def to_megatron(source: Path, target: Path, tensor: int, pipeline: int, config: Path | None = None) -> int:
    is_megatron = (source / ".metadata").is_file()
    opened = convert.open_megatron(source, config) if is_megatron else convert.open_hf(source)
    return convert.to_megatron(*opened, target, tensor, pipeline, quiet)


def to_hf(source: Path, target: Path, config: Path | None = None) -> int:
    return convert.to_hf(*convert.open_megatron(source, config), target, quiet)


def save_checkpoint(root: Path, step: int, model: ModelState, keep: int = 1, run: dict[str, Any] | None = None) -> Path:
    """Write a checkpoint of one model at once, and return its folder. run: content of run.json."""
    save = checkpoint.begin(root, step, [model], run=run or {}, keep=keep, files={}, copy=False)
    save.write()
    save.raise_if_failed()
    return save.target


def raise_disk_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def refuse_checkpoint(patch: Any, trainer: Any, step: int) -> None:
    """Make the disk refuse the checkpoint of a step. patch: pytest's monkeypatch."""
    plan = checkpoint.plan

    def plan_for_a_full_disk(*arguments: Any) -> Any:
        shards = plan(*arguments)
        if trainer.state.step == step:
            patch.setattr(shards, "write", raise_disk_full)
        return shards

    patch.setattr(checkpoint, "plan", plan_for_a_full_disk)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def assert_same_weights(a: Path, b: Path) -> None:
    first, second = tiny.weights(a), tiny.weights(b)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype
        assert torch.equal(tensor.view(torch.uint8), second[name].view(torch.uint8)), name


QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
# Qwen2.5-1.5B with fewer and narrower layers.
SMALLER = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 509}


def peak_of_allocations(run, mapped: Path) -> int:
    """Return the most bytes of tensors alive at one time, by torch's allocator, without those mapped from a file."""
    mapped_bytes = mapped.stat().st_size
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    alive = peak = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        if abs(event.nbytes()) != mapped_bytes:
            alive += event.nbytes()  # negative if memory is freed
            peak = max(peak, alive)
    return peak
