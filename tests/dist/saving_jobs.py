"""A checkpoint that is written at once, and one of the same state that is written during the next step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fakes
import torch
from dist.jobs import grid_of
from dist.steps import _go_on, configured, make_trainer
from safetensors.torch import load_file

from megatron_brorl.checkpoints.training import Save
from megatron_brorl.errors import UserError
from megatron_brorl.models.weights import names
from megatron_brorl.models.weights.layouts import to_local
from megatron_brorl.train.worker import Worker


def both_ways(
    _rank: int, directory: str, parallel: dict[str, Any], changes: dict[str, Any], root: str
) -> tuple[list[dict[str, float]], list[str], bool]:
    """Take two steps, save both checkpoints, and take two more steps.

    Return metrics, the files of the second checkpoint during the third step, and whether it was unfinished then."""
    trainer = make_trainer(directory, grid_of(**parallel), configured(changes), fakes.Engine())
    trainer.run_seconds = lambda: 7.5  # type: ignore[method-assign]  # wall-clock time, which run.json holds
    trainer.sync_weights()
    metrics = [trainer.train_step()[0] for _ in range(2)]

    def into(name: str) -> None:
        run = replace(trainer.config.run, dir=f"{root}/{name}")
        trainer.config = replace(trainer.config, run=run)

    into("at_once")
    trainer.save()

    # No file is written before all ranks have finished the third step.
    changed = threading.Event()
    write = Save.write

    def late(*arguments: Any) -> None:
        assert changed.wait(60)
        write(*arguments)

    into("meanwhile")
    Save.write = late  # type: ignore[method-assign]
    try:
        trainer.save(in_background=True)
        metrics.append(trainer.train_step()[0])
        there = sorted(p.name for p in Path(f"{root}/meanwhile/checkpoints").iterdir())
        busy = trainer.background_saver.busy()
        changed.set()
        # The messages of the saver and of a step overlap.
        metrics.append(trainer.train_step()[0])
        assert trainer.background_saver.wait()
    finally:
        Save.write = write  # type: ignore[method-assign]
    return metrics, there, busy


def saves_over_dirty_memory(_rank: int, directory: str, changes: dict[str, Any], roots: list[str]) -> None:
    """Save one state twice; the second time new tensors of `torch.empty` are full of sevens."""
    trainer = make_trainer(directory, grid_of(), configured(changes), fakes.Engine())
    trainer.run_seconds = lambda: 7.5  # type: ignore[method-assign]
    trainer.sync_weights()
    trainer.train_step()
    empty = torch.empty
    for root, dirty in zip(roots, (False, True), strict=True):
        trainer.config = replace(trainer.config, run=replace(trainer.config.run, dir=root))
        try:
            if dirty:
                torch.empty = lambda *a, **k: empty(*a, **k).fill_(7)  # type: ignore[assignment]
            trainer.save()
        finally:
            torch.empty = empty  # type: ignore[assignment]


def refused(_rank: int, directory: str, parallel: dict[str, Any], changes: dict[str, Any], root: str) -> str:
    """Return the error with which a trainer of another layout answers the checkpoint under `root`."""
    try:
        _go_on(directory, grid_of(**parallel), configured(changes | {"run": {"seed": 3, "dir": root}}), [], 0)
    except UserError as e:
        return str(e)
    return ""


def masters(
    _rank: int, directory: str, parallel: dict[str, Any], root: str
) -> tuple[tuple[set[str], set[str]], tuple[set[str], set[str]]]:
    """Compare float32 masters of a bfloat16 model with its file: after loading, and after a checkpoint before any step.

    Return the names of the tensors that differ, and of all of which this rank has a part.
    """
    settings = {"distributed_optimizer": True}
    config = configured({"parallel": settings, "model": {"dtype": "bf16"}, "run": {"seed": 3, "dir": root}})
    grid = grid_of(**parallel)
    stored = load_file(f"{directory}/model.safetensors")

    def found(worker: Worker) -> tuple[set[str], set[str]]:
        parameters = names.global_parameters(worker.actor)
        entries = {id(parameters[e.megatron]): e for e in names.entries(worker.shape, 1) if e.megatron in parameters}
        wrong: set[str] = set()
        seen: set[str] = set()
        for optimizer, parameter, master in _masters(worker):
            entry = entries[id(parameter)]
            flat = to_local(entry, [stored[name] for name in entry.hf], worker.shape.kv_heads, 0, 1).flatten()
            start = optimizer._get_model_param_range_map(parameter)["param"].start
            seen.update(entry.hf)
            if not torch.equal(master, flat[start : start + len(master)]):
                wrong.update(entry.hf)
        return wrong, seen

    first = make_trainer(directory, grid, config, fakes.Engine())
    first.save()
    second = make_trainer(directory, grid, config, fakes.Engine())
    for _, _, master in _masters(second.models.actor):
        master.detach().zero_()
    second.restore(Path(root) / "checkpoints" / "step_00000000")
    return found(first.models.actor), found(second.models.actor)


def _masters(worker: Worker) -> Iterator[tuple[Any, torch.Tensor, torch.Tensor]]:
    """Yield each optimizer, parameter, and this rank's part of the float32 master."""
    for optimizer in worker.optimizer.chained_optimizers:
        for groups in zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True):
            for parameter, master in zip(*groups, strict=True):
                yield optimizer, parameter, master
