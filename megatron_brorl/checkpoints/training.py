"""Checkpoints for resuming: Megatron's distributed format, written aside, hashed and renamed.

    checkpoints/step_00000003/   Megatron's files, run.json, manifest.json (SHA-256 of every other file)
    checkpoints/latest           the name of the newest complete one, moved last

A checkpoint has exactly the name of the step that its run.json holds; whatever else lies there is the user's.
Megatron-Core 0.16 loads a checkpoint with a flipped byte without a word, hence the manifest.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor, dict_utils
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory, is_main_replica
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron_brorl.checkpoints import manifest, unpickle
from megatron_brorl.checkpoints.hugging_face import replace_directory
from megatron_brorl.checkpoints.shard_writer import Refusals, writing
from megatron_brorl.errors import UserError
from megatron_brorl.json_files import read_object
from megatron_brorl.models.finite import require_finite
from megatron_brorl.models.hf_names import global_parameters
from megatron_brorl.parallel import collectives, device

LATEST = "latest"
RUN = "run.json"
STEP = "step"  # key of run.json: steps done
STEPPED = "optimizers_that_have_stepped"  # key of run.json: names of parts
WRITING_MARGIN = 1.05  # of the tensors' size, for what Megatron writes about them


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
            "(brorl convert to-hf) with a lower learning rate",
        )


class NotWritten(UserError):
    """A checkpoint that the disk did not take; nothing of it is left, and those before are as they were."""


def save(
    root: Path,
    step: int,
    parts: Sequence[Part],
    run: dict[str, Any],
    keep: int,
    add: Callable[[Path], None] = lambda directory: None,
) -> Path:
    """Write the state after `step` steps; a collective. Keeps the newest `keep` up to this step.

    run: JSON that read_run gives back, with the step. add: called on every rank to put files of its own into the
    directory. What is not a checkpoint but has this one's name is renamed (step_00000003.1, ...) and told on stderr.
    Raises UserError, and leaves everything as it is, where a weight is not finite; NotWritten, on all ranks, where the
    disk refuses something to one of them.
    """
    check(parts, step)

    # An optimizer that has not stepped yet has no state that Megatron could save.
    stepped = [part.name for part in parts if part.optimizer and part.optimizer.optimizer.state]
    states = _states(parts, stepped)
    needed = collectives.all_reduce_sum({"bytes": _bytes(states)})["bytes"]  # of all ranks

    # Everything is written beside the place that it will take.
    target = root / _name(step)
    aside, refusals = root / f".{target.name}.writing", Refusals()
    if dist.get_rank() == 0:
        with refusals.caught():
            _begin(aside, needed)
    _agree(refusals, target)

    # Every rank its shards, and what is left of a directory that lacks one is nothing.
    with device.bridge(), writing(refusals):
        dist_checkpointing.save(states, str(aside))
    with refusals.caught():
        add(aside)  # the caller's own
    _agree(refusals, target, aside)

    # Complete: hashed, renamed, pointed to, and only then older ones go.
    if dist.get_rank() == 0:
        with refusals.caught():
            (aside / RUN).write_text(json.dumps({**run, STEP: step, STEPPED: stepped}, indent=1), encoding="utf-8")
            manifest.write(aside)
            _give_way(target, step)  # what is the user's is kept
            replace_directory(aside, target)
            _write_atomically(root / LATEST, target.name)
            rotate(root, step, keep)
    _agree(refusals, target, aside)
    return target


def _begin(aside: Path, needed: float) -> None:
    """Make the directory, where there is room for it. Raises OSError."""
    aside.parent.mkdir(parents=True, exist_ok=True)
    _remove_unfinished(aside.parent)  # a save that was killed may have left this very name
    free = shutil.disk_usage(aside.parent).free
    if free < needed * WRITING_MARGIN:
        raise OSError(errno.ENOSPC, f"it needs {needed / 2**20:,.0f} MiB and {free / 2**20:,.0f} MiB are free")
    aside.mkdir()


def _agree(refusals: Refusals, target: Path, aside: Path | None = None) -> None:
    """Raise NotWritten on all ranks where one was refused something, after what was written aside is removed."""
    told = [text for text in collectives.all_gather_text(refusals.told()) if text]
    if not told:
        return
    if aside and dist.get_rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)
    dist.barrier()
    raise NotWritten(f"{target}: cannot be written: {told[0]}; free some space or make the folder writable")


def _bytes(state: Any) -> float:
    """What a rank's part of the state takes on disk: tensors that no other rank writes."""
    found = 0.0
    for value in dict_utils.nested_values(state):
        if (
            isinstance(value, (ShardedTensor, ShardedTensorFactory))
            and is_main_replica(value.replica_id)
            and value.data is not None
        ):
            found += value.data.numel() * value.data.element_size()
    return found


def rotate(root: Path, step: int, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints up to `step`; never what save did not write, nor a later one."""
    # A link's target lies elsewhere, and a folder whose run.json is gone or of another step is no checkpoint of ours.
    own = [s for s, d in _folders(root).items() if s <= step and not d.is_symlink() and _stored_step(d) == s]
    for old in sorted(own)[:-keep]:
        shutil.rmtree(root / _name(old))


def find(root: Path) -> Path | None:
    """The newest complete checkpoint under root, or None where there is none.

    A folder of another name, or whose run.json holds another step than its name (a copy), is left out of account.
    Raises UserError where checkpoints exist but the newest is damaged, or is not the one that `latest` names: going on
    from an older one is the user's choice.
    """
    pointer = root / LATEST
    steps = [step for step, folder in _folders(root).items() if _stored_step(folder) in (step, None)]

    # What `latest` names counts even where its folder is gone: falling back to an older one without a word
    # would throw steps away.
    if pointer.is_file():
        named = pointer.read_text(encoding="utf-8", errors="replace").strip()
        pointed = _step_of(named)
        if pointed is None:
            raise UserError(f"{pointer}: says {named!r}, which is no checkpoint's name; delete it to go on without it")
        steps.append(pointed)

    if not steps:
        return None

    # A crash between the two renames leaves a complete checkpoint newer than the pointer: take it.
    newest = max(steps)  # numbers, since names do not sort beyond 8 digits
    directory = root / _name(newest)

    # It is read only when every byte is what was written; Megatron would not notice.
    if directory.is_dir():
        stored = _stored_step(directory)
        copied = f"is a copy of step {stored}" if stored not in (newest, None) else ""
        problem = copied or manifest.damage(directory)
    else:
        problem = "is missing"

    if problem:
        raise UserError(f"{directory}: {problem}; delete it and {pointer} to go on from an older checkpoint")
    return directory


def steps_of(root: Path) -> list[int]:
    """The steps of the checkpoints under root, complete or not, the newest last."""
    return sorted(_folders(root))


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _step_of(name: str) -> int | None:
    """The step whose checkpoint has exactly this name."""
    found = re.fullmatch("step_([0-9]{8,})", name)
    return int(found[1]) if found and _name(int(found[1])) == name else None


def _folders(root: Path) -> dict[int, Path]:
    """The folders that have the name of a step, by step."""
    named = ((_step_of(path.name), path) for path in root.glob("step_*"))
    return {step: path for step, path in named if step is not None and path.is_dir()}


def _stored_step(directory: Path) -> int | None:
    """The step of a folder's run.json; None where it cannot be read."""
    try:
        step = read_run(directory)[STEP]
    except (UserError, KeyError):
        return None
    return step if type(step) is int else None


def _remove_unfinished(root: Path) -> None:
    """Delete what a save that was killed left."""
    for path in root.glob(".step_*.writing"):
        if _step_of(path.name.removeprefix(".").removesuffix(".writing")) is None:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _give_way(target: Path, step: int) -> None:
    """Rename what has the name of the checkpoint that is about to be put in place, but is none of that step."""
    ours = target.is_dir() and not target.is_symlink() and _stored_step(target) == step
    if ours or not (target.exists() or target.is_symlink()):
        return
    number = 1
    while (aside := target.with_name(f"{target.name}.{number}")).exists() or aside.is_symlink():
        number += 1
    target.rename(aside)
    print(f"warning: {target}: is no checkpoint of step {step}; it is now {aside.name}", file=sys.stderr, flush=True)


def read_run(directory: Path) -> dict[str, Any]:
    """What save was given as `run`, and the names of the optimizers that had stepped. Raises UserError."""
    return read_object(directory / RUN, f"delete {directory} to go on from an older checkpoint")


def load(directory: Path, parts: Sequence[Part]) -> None:
    """Restore weights and optimizer state bit for bit; a collective. The layout may differ from the saved one.

    Raises UserError where a weight is not finite.
    """
    stepped = read_run(directory)[STEPPED]
    with device.bridge():
        try:
            with unpickle.restricted():
                state = dist_checkpointing.load(_states(parts, stepped, loading=True), str(directory))
        except (UserError, CheckpointException, CheckpointingException, pickle.UnpicklingError, EOFError) as e:
            # Torch says by a traceback per rank what one of them could not read.
            why = str(e).rstrip().rpartition("\n")[2]
            raise UserError(f"{directory}: {why}; it comes from elsewhere or is damaged: delete it") from None
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
