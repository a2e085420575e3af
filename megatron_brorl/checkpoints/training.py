"""Checkpoints for resuming: Megatron's distributed format, written aside, hashed and renamed.

    checkpoints/step_00000003/   Megatron's files, run.json, manifest.json (SHA-256 of every other file)
    checkpoints/latest           the name of the newest complete one, moved last

A checkpoint has exactly the name of the step that its run.json holds; whatever else lies there is the user's.
Megatron-Core 0.16 loads a checkpoint with a flipped byte without a word, hence the manifest.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import pickle
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor, dict_utils
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory, is_main_replica
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron_brorl.checkpoints import best, distributed_optimizer, folders, manifest, unpickle, verified_files
from megatron_brorl.checkpoints.best import Best
from megatron_brorl.checkpoints.folders import LATEST, LAYOUT, RUN, STEP, STEPPED, read_run
from megatron_brorl.checkpoints.host_copies import HostCopies
from megatron_brorl.checkpoints.hugging_face import replace_directory
from megatron_brorl.checkpoints.shard_writer import Shards, plan
from megatron_brorl.checkpoints.verified_files import Refusals
from megatron_brorl.errors import UserError
from megatron_brorl.models.finite import require_finite
from megatron_brorl.models.hf_names import global_parameters
from megatron_brorl.parallel import collectives, device

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
        if distributed_optimizer.is_distributed(self.optimizer):
            optimizer = distributed_optimizer.sharded_state(self.optimizer, model, self.prefix, loading)
        else:
            optimizer = self.optimizer.sharded_state_dict(model, is_loading=loading)
        return {"model": model, "optimizer": optimizer}

    def restore(self, state: dict[str, Any], directory: Path) -> None:
        """Load what `state` returned and Megatron filled. An optimizer without a saved state gets the module's weights.

        directory: named in errors.
        """
        model = {k.removeprefix(self.prefix): v for k, v in state["model"].items()}
        if self.weights is not None:
            for name, weight in self.weights.items():
                weight.copy_(model[name])
            return
        self.module.load_state_dict(model)
        if "optimizer" in state and distributed_optimizer.is_distributed(self.optimizer):
            distributed_optimizer.restore(self.optimizer, state["optimizer"], directory)
        elif "optimizer" in state:
            self.optimizer.load_state_dict(state["optimizer"])
        else:
            self.optimizer.reload_model_params()


def check(parts: Sequence[Part], step: int) -> None:
    """Raise UserError where the state after `step` steps is not finite and must not be written; a collective."""
    for part in parts:
        part.require_finite(
            f"the state after {step} step{'' if step == 1 else 's'}",
            "no checkpoint is written, and those before stay; start anew from the last one's weights "
            "(brorl convert to-hf) with a lower learning rate",
        )


class NotWritten(UserError):
    """A checkpoint that the disk did not take; nothing of it is left, and those before are as they were."""


@dataclass
class Save:
    """A checkpoint whose state is taken: `write` brings it to the disk, `agree` tells all ranks what became of it."""

    target: Path
    keep: int  # the newest ones that stay
    files: dict[str, bytes]  # this rank's own, by name
    shards: Shards = field(init=False)  # this rank's, once there is a directory for them
    refusals: Refusals = field(default_factory=Refusals)
    best: Best | None = None  # this one, where `best` is to name it

    @property
    def aside(self) -> Path:
        """Where it is written, beside the place that it will take."""
        return self.target.with_name(f".{self.target.name}.writing")

    def write(self, group: dist.ProcessGroup | None = None) -> None:
        """Write and verify this rank's files, and on rank 0 put the whole in its place; a collective of the group.

        What the disk refuses is kept for `agree`. group: of all ranks; where this runs beside the run's own
        collectives, one that they do not use.
        """
        digests: dict[str, str] = {}
        results: list[Any] = []
        with self.refusals.caught():
            digests, results = self.shards.write(self.aside)
            digests |= {name: verified_files.write(self.aside / name, data) for name, data in self.files.items()}

        # Rank 0 hears what the others wrote, or that they could not.
        parts = _gather((self.refusals.told(), digests, results), group)
        if parts is None:
            return
        told, digests_of, results_of = zip(*parts, strict=True)
        whole = not any(told)
        if whole:
            with self.refusals.caught():
                self._complete({name: digest for found in digests_of for name, digest in found.items()}, results_of)
        # What is left of a directory that lacks a file is nothing.
        if self.refusals.errors or not whole:
            shutil.rmtree(self.aside, ignore_errors=True)

    def agree(self) -> None:
        """Raise NotWritten on all ranks where one was refused something; a collective, after `write` on all of them."""
        told = [text for text in collectives.all_gather_text(self.refusals.told()) if text]
        if told:
            raise NotWritten(
                f"{self.target}: cannot be written: {told[0]}; free some space or make the folder writable"
            )

    def _complete(self, digests: dict[str, str], results: Sequence[list[Any]]) -> None:
        """On rank 0, when all files of all ranks are on the disk: indexed, hashed, renamed, pointed to."""
        for name, data in self.shards.index(results).items():
            digests[name] = verified_files.write(self.aside / name, data)
        manifest.write(self.aside, digests)

        # Only then older ones go.
        root, step = self.target.parent, folders.step_of(self.target.name)
        assert step is not None
        folders.give_way(self.target, step)  # what is the user's is kept
        replace_directory(self.aside, self.target)
        folders.point(root / LATEST, self.target.name)
        if self.best:
            best.write(root, self.best)
        folders.rotate(root, step, self.keep)


def begin(
    root: Path,
    step: int,
    parts: Sequence[Part],
    run: dict[str, Any],
    keep: int,
    files: Mapping[str, bytes] | None = None,
    copies: HostCopies | None = None,
) -> Save:
    """Take the state after `step` steps, to be written; a collective. Keeps the newest `keep` up to this step.

    run: JSON that read_run gives back, with the step. files: this rank's own, by names that are its alone.
    copies: where to take the state, which may change before it is written.
    Raises UserError, and leaves everything as it is, where a weight is not finite; NotWritten, on all ranks, where
    there is no room.
    """
    check(parts, step)

    # Without the distributed optimizer, Megatron cannot save the state of an optimizer that has not stepped.
    for part in parts:
        if part.optimizer and distributed_optimizer.is_distributed(part.optimizer):
            distributed_optimizer.initialise(part.optimizer)
    stepped = [part.name for part in parts if part.optimizer and part.optimizer.optimizer.state]
    states = _states(parts, stepped)
    needed = collectives.all_reduce_sum({"bytes": _bytes(states)})["bytes"]  # of all ranks

    # All ranks write into one directory, which is there before any of them takes memory for it.
    begun = Save(root / folders.name_of(step), keep, dict(files or {}))
    if dist.get_rank() == 0:
        known = {**run, STEP: step, STEPPED: stepped, LAYOUT: _optimizer_layout(parts)}
        begun.files[RUN] = json.dumps(known, indent=1).encode()
        with begun.refusals.caught():
            _make(begun.aside, needed)
    begun.agree()

    with device.bridge():
        begun.shards = plan(states, begun.target.name, copies)
    return begun


def save(
    root: Path,
    step: int,
    parts: Sequence[Part],
    run: dict[str, Any],
    keep: int,
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """`begin`, and all of it at once; a collective.

    What is not a checkpoint but has this one's name is renamed (step_00000003.1, ...) and told on stderr. Raises as
    begin does; NotWritten, on all ranks, where the disk refuses something to one of them.
    """
    begun = begin(root, step, parts, run, keep, files)
    begun.write()
    begun.agree()
    return begun.target


def _make(aside: Path, needed: float) -> None:
    """Make the directory, where there is room for it. Raises OSError."""
    aside.parent.mkdir(parents=True, exist_ok=True)
    folders.remove_unfinished(aside.parent)  # a save that was killed may have left this very name
    free = shutil.disk_usage(aside.parent).free
    if free < needed * WRITING_MARGIN:
        raise OSError(errno.ENOSPC, f"it needs {needed / 2**20:,.0f} MiB and {free / 2**20:,.0f} MiB are free")
    aside.mkdir()


def _gather(own: Any, group: dist.ProcessGroup | None) -> list[Any] | None:
    """What every rank has, in rank order, on rank 0; None on the others."""
    world = dist.get_world_size(group)
    if world == 1:
        return [own]
    found: list[Any] | None = [None] * world if dist.get_rank() == 0 else None
    dist.gather_object(own, found, dst=0, group=group)
    return found


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


def find(root: Path) -> Path | None:
    """The newest complete checkpoint under root, or None where there is none.

    A folder of another name, or whose run.json holds another step than its name (a copy), is left out of account.
    Raises UserError where checkpoints exist but the newest is damaged, or is not the one that `latest` names: going on
    from an older one is the user's choice.
    """
    pointer = root / LATEST
    steps = [step for step, folder in folders.by_step(root).items() if folders.stored_step(folder) in (step, None)]

    # What `latest` names counts even where its folder is gone: falling back to an older one without a word
    # would throw steps away.
    if pointer.is_file():
        named = pointer.read_text(encoding="utf-8", errors="replace").strip()
        pointed = folders.step_of(named)
        if pointed is None:
            raise UserError(f"{pointer}: says {named!r}, which is no checkpoint's name; delete it to go on without it")
        steps.append(pointed)

    if not steps:
        return None

    # A crash between the two renames leaves a complete checkpoint newer than the pointer: take it.
    newest = max(steps)  # numbers, since names do not sort beyond 8 digits
    directory = root / folders.name_of(newest)

    # It is read only when every byte is what was written; Megatron would not notice.
    if directory.is_dir():
        stored = folders.stored_step(directory)
        copied = f"is a copy of step {stored}" if stored not in (newest, None) else ""
        problem = copied or manifest.damage(directory)
    else:
        problem = "is missing"

    if problem:
        raise UserError(f"{directory}: {problem}; delete it and {pointer} to go on from an older checkpoint")
    return directory


def load(directory: Path, parts: Sequence[Part]) -> None:
    """Restore weights and optimizer state bit for bit; a collective. The layout may differ from the saved one.

    With the distributed optimizer, only the data-parallel size may differ. Raises UserError if the layout is another
    or a weight is not finite.
    """
    run = read_run(directory)
    stepped = run[STEPPED]
    saved, now = run.get(LAYOUT), _optimizer_layout(parts)
    if stepped and saved != now:
        raise UserError(
            f"{directory}: its optimizer state was saved with {_describe(saved)} and this run has {_describe(now)}; "
            "use the saved settings, or convert its weights (brorl convert to-hf) and start a new run from them"
        )
    with device.bridge():
        try:
            with unpickle.restricted(), _quiet():
                state = dist_checkpointing.load(_states(parts, stepped, loading=True), str(directory))
        except (UserError, CheckpointException, CheckpointingException, pickle.UnpicklingError, EOFError) as e:
            # Torch says by a traceback per rank what one of them could not read.
            why = str(e).rstrip().rpartition("\n")[2]
            # A disk that fails says nothing of the checkpoint.
            number = re.search(r"\[Errno (\d+)\]", why)
            failed = number and int(number[1]) != errno.ENOENT
            remedy = (
                "mend that, and start the same command again"
                if failed
                else "it comes from elsewhere or is damaged: delete it"
            )
            raise UserError(f"{directory}: {why}; {remedy}") from None
        for part in parts:
            part.restore(state[part.name] if part.name else state, directory)
    for part in parts:
        part.require_finite(
            str(directory), f"delete it and {directory.parent / LATEST} to go on from an older checkpoint"
        )


def _optimizer_layout(parts: Sequence[Part]) -> dict[str, int] | None:
    """Return the layout that the optimizer state is bound to, or None if it can be loaded under any."""
    if not any(part.optimizer and distributed_optimizer.is_distributed(part.optimizer) for part in parts):
        return None
    return {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
    }


def _describe(layout: dict[str, int] | None) -> str:
    if layout is None:
        return "parallel.distributed_optimizer = false"
    sizes = ", ".join(f"parallel.{name} = {size}" for name, size in layout.items())
    return f"parallel.distributed_optimizer = true, {sizes}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Torch logs a traceback of what it then raises."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _states(parts: Sequence[Part], stepped: Sequence[str], loading: bool = False) -> dict[str, Any]:
    """The actor's state, and those of the other parts by name."""
    states: dict[str, Any] = {}
    for part in parts:
        own = part.state(part.name in stepped, loading)
        states |= {part.name: own} if part.name else own
    return states
