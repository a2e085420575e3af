"""Checkpoints for resuming: Megatron's distributed format, written aside, hashed and renamed.

    checkpoints/step_00000003/   Megatron's files, run.json, manifest.json (SHA-256 of every other file)
    checkpoints/latest           the name of the newest complete one, moved last

Megatron-Core 0.16 loads a checkpoint with a flipped byte without a word, hence the manifest.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch import Tensor

from megatron_brorl.checkpoints import manifest
from megatron_brorl.checkpoints.hugging_face import replace_directory
from megatron_brorl.errors import UserError
from megatron_brorl.models.finite import require_finite
from megatron_brorl.models.hf_names import global_parameters
from megatron_brorl.parallel import device

LATEST = "latest"
RUN = "run.json"
STEPPED = "optimizers_that_have_stepped"  # key of run.json: names of parts


@dataclass(frozen=True)
class Part:
    """A model of a run with its optimizer. The actor is called "": its tensors are named as in any checkpoint."""

    name: str  # stands before the names of its tensors
    module: Any
    optimizer: Any = None  # None: it has none
    weights: dict[str, Tensor] | None = None  # by the module's names, in place of the module's own

    @property
    def prefix(self) -> str:
        """What stands before the names of its tensors in the checkpoint."""
        return f"{self.name}." if self.name else ""

    def require_finite(self, what: str, then: str) -> None:
        """Raise UserError where a weight is NaN or infinite; a collective. what, then: around its name."""
        named = global_parameters(self.module) if self.weights is None else self.weights
        require_finite(named, f"{what}, {self.name or 'actor'}", then)

    def state(self, with_optimizer: bool, loading: bool = False) -> dict[str, Any]:
        """Megatron's sharded state; an optimizer that has not stepped yet has none."""
        model = self.module.sharded_state_dict(prefix=self.prefix)
        for name, weight in (self.weights or {}).items():
            model[self.prefix + name].data = weight
        if not with_optimizer:
            return {"model": model}
        return {"model": model, "optimizer": self.optimizer.sharded_state_dict(model, is_loading=loading)}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave and Megatron filled; an optimizer without a state gets the module's weights."""
        model = {k.removeprefix(self.prefix): v for k, v in state["model"].items()}
        if self.weights is not None:
            for name, weight in self.weights.items():
                weight.copy_(model[name])
            return
        self.module.load_state_dict(model)
        if "optimizer" in state:
            self.optimizer.load_state_dict(state["optimizer"])
        else:
            self.optimizer.reload_model_params()


def check(parts: Sequence[Part], step: int) -> None:
    """Raise UserError where the state after `step` steps is not finite and must not be written; a collective."""
    for part in parts:
        part.require_finite(
            f"step {step}",
            "no checkpoint is written, and those before stay; start anew from the last one's weights "
            "(tools/convert_checkpoint.py to-hf) with a lower learning rate",
        )


def save(
    root: Path,
    step: int,
    parts: Sequence[Part],
    run: dict[str, Any],
    keep: int,
    add: Callable[[Path], None] = lambda directory: None,
) -> Path:
    """Write the state after `step` steps; a collective. Keeps the newest `keep`.

    run: JSON that read_run gives back. add: called on every rank to put files of its own into the directory. Raises
    UserError, and leaves everything as it is, where a weight is not finite.
    """
    check(parts, step)

    # Everything is written beside the place that it will take.
    target = root / f"step_{step:08d}"
    aside = root / f".{target.name}.writing"
    if dist.get_rank() == 0:
        for stale in root.glob(".step_*.writing"):
            shutil.rmtree(stale)
        aside.mkdir(parents=True)
    dist.barrier()

    # Every rank its shards. An optimizer that has not stepped yet has no state that Megatron could save.
    stepped = [part.name for part in parts if part.optimizer and part.optimizer.optimizer.state]
    # Megatron starts a process that imports torch (190 MiB, seconds) for a queue that asynchronous saves alone need.
    filesystem_async._results_queue = filesystem_async._results_queue or queue.Queue()
    with device.bridge():
        dist_checkpointing.save(_states(parts, stepped), str(aside))
    add(aside)
    dist.barrier()

    # Complete: hashed, renamed, pointed to, and only then older ones go.
    if dist.get_rank() == 0:
        (aside / RUN).write_text(json.dumps({**run, STEPPED: stepped}, indent=1), encoding="utf-8")
        manifest.write(aside)
        replace_directory(aside, target)
        _write_atomically(root / LATEST, target.name)
        for old in sorted(root.glob("step_*"))[:-keep]:
            shutil.rmtree(old)
    dist.barrier()
    return target


def find(root: Path) -> Path | None:
    """The newest complete checkpoint under root, or None where there is none.

    Raises UserError where checkpoints exist but the newest is damaged: going on from an older one is the user's choice.
    """
    candidates = sorted(root.glob("step_*"))
    if not candidates:
        return None
    pointer = root / LATEST
    name = pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else candidates[-1].name
    # A crash between the two renames leaves a complete checkpoint newer than the pointer: take it.
    newest = max(candidates[-1].name, name)
    directory = root / newest
    problem = manifest.damage(directory)
    if problem:
        raise UserError(f"{directory}: {problem}; delete it and {pointer} to go on from an older checkpoint")
    return directory


def read_run(directory: Path) -> dict[str, Any]:
    """What save was given as `run`, and the names of the optimizers that had stepped."""
    return json.loads((directory / RUN).read_text(encoding="utf-8"))


def load(directory: Path, parts: Sequence[Part]) -> None:
    """Restore weights and optimizer state bit for bit; a collective. The layout may differ from the saved one.

    Raises UserError where a weight is not finite.
    """
    stepped = read_run(directory)[STEPPED]
    with device.bridge():
        state = dist_checkpointing.load(_states(parts, stepped, loading=True), str(directory))
        for part in parts:
            part.restore(state[part.name] if part.name else state)
    for part in parts:
        part.require_finite(
            str(directory), f"delete it and {directory.parent / LATEST} to go on from an older checkpoint"
        )


def _states(parts: Sequence[Part], stepped: Sequence[str], loading: bool = False) -> dict[str, Any]:
    """The actor's state, and those of the other parts by name."""
    states: dict[str, Any] = {}
    for part in parts:
        own = part.state(part.name in stepped, loading)
        states |= {part.name: own} if part.name else own
    return states


def _write_atomically(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.writing")
    with aside.open("w", encoding="utf-8") as f:
        f.write(text + "\n")
        f.flush()
        os.fsync(f.fileno())
    aside.rename(path)
