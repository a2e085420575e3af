"""Checkpoints for resuming a run, in Megatron's distributed format: written to a temporary folder, hashed, renamed.

A checkpoint is either written at once or by a thread while the run continues. Resume only from checkpoints that you
trust: Megatron's format contains pickles.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import pickle
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from megatron_brorl.checkpoints import folders
from megatron_brorl.checkpoints.folders import LATEST, LAYOUT, RUN, STEP, STEPPED, Best, read_run
from megatron_brorl.checkpoints.hugging_face import replace_directory
from megatron_brorl.checkpoints.model_state import ModelState, initialise, is_distributed
from megatron_brorl.checkpoints.writer import Shards, plan, write_verified
from megatron_brorl.errors import UserError
from megatron_brorl.parallel import collectives, cpu_bridge


class NotWritten(UserError):
    """A checkpoint could not be written. Its files have been removed; older checkpoints are unchanged."""


@dataclass
class Save:
    """A checkpoint whose state has been captured. `write` writes it, and `raise_if_failed` raises if that failed."""

    target: Path
    step: int
    keep: int  # number of newest checkpoints to keep
    files: dict[str, bytes]  # this rank's additional files, by name
    shards: Shards = field(init=False)
    error: str = ""  # the first disk error on this rank
    best: Best | None = None  # set if this checkpoint is the best one so far

    @property
    def aside(self) -> Path:
        """The temporary folder in which the checkpoint is written."""
        return self.target.with_name(f".{self.target.name}.writing")

    @contextlib.contextmanager
    def catch(self) -> Iterator[None]:
        """Store a disk error in `error`, so that all ranks reach the same collectives."""
        try:
            yield
        except OSError as e:
            self.error = self.error or e.strerror or " ".join(str(e).split())[:200] or type(e).__name__

    def write(self, group: dist.ProcessGroup | None = None) -> None:
        """Write and verify this rank's files, and on rank 0 put the checkpoint in place; a collective.

        Disk errors are kept for `raise_if_failed`. group: has all ranks. None is for a run that waits for the write.
        """
        digests: dict[str, str] = {}
        results: list[Any] = []
        with self.catch():
            digests, results = self.shards.write(self.aside)
            digests |= {name: self._write_file(name, data) for name, data in self.files.items()}

        gathered = _gather((self.error, digests, results), group)
        if gathered is None:
            return
        errors, digests_of, results_of = zip(*gathered, strict=True)
        complete = not any(errors)
        if complete:
            with self.catch():
                self._complete({name: digest for by_name in digests_of for name, digest in by_name.items()}, results_of)
        if self.error or not complete:
            shutil.rmtree(self.aside, ignore_errors=True)

    def raise_if_failed(self) -> None:
        """Raise NotWritten on all ranks if `write` failed on one of them; a collective."""
        errors = [text for text in collectives.all_gather(self.error) if text]
        if errors:
            raise NotWritten(
                f"{self.target}: cannot be written: {errors[0]}; free some space or make the folder writable"
            )

    def _write_file(self, name: str, data: bytes) -> str:
        return write_verified(self.aside / name, lambda stream: stream.write(data))[0]

    def _complete(self, digests: dict[str, str], results: Sequence[list[Any]]) -> None:
        """Write index and manifest, and put the checkpoint in place; on rank 0, after all ranks have written."""
        digests |= {name: self._write_file(name, data) for name, data in self.shards.index(results).items()}
        folders.write_manifest(self.aside, digests)

        root = self.target.parent
        replace_directory(self.aside, self.target)
        folders.write_pointer(root / LATEST, self.target.name)
        if self.best:
            folders.write_best(root, self.best)
        folders.rotate(root, self.step, self.keep)


def begin(
    root: Path,
    step: int,
    models: Sequence[ModelState],
    run: dict[str, Any],
    keep: int,
    files: Mapping[str, bytes],
    copy: bool,
) -> Save:
    """Capture the state after `step` steps for writing; a collective.

    run: content of run.json, to which the step is added. keep: number of newest checkpoints to keep, up to this step.
    files: additional files of this rank, under names that no other rank uses. copy: copy the state, because it may
    change before it is written. Raises NotWritten, on all ranks, if the folder cannot be created.
    """
    # Without the distributed optimizer, Megatron cannot save the state of an optimizer that has not stepped.
    for model in models:
        if model.optimizer and is_distributed(model.optimizer):
            initialise(model.optimizer)
    stepped = [
        model.name
        for model in models
        if model.optimizer and any(part.optimizer.state for part in model.optimizer.chained_optimizers)
    ]
    states = _states(models, stepped)

    # Create the folder before any rank allocates memory for a copy.
    save = Save(root / folders.name_of(step), step, keep, dict(files))
    if dist.get_rank() == 0:
        content = {**run, STEP: step, STEPPED: stepped, LAYOUT: _optimizer_layout(models)}
        save.files[RUN] = json.dumps(content, indent=1).encode()
        with save.catch():
            root.mkdir(parents=True, exist_ok=True)
            folders.remove_unfinished(root)  # a killed save may have left save.aside
            save.aside.mkdir()
    save.raise_if_failed()

    with cpu_bridge.bridge():
        save.shards = plan(states, save.target.name, copy)
    return save


def _gather(local: Any, group: dist.ProcessGroup | None) -> list[Any] | None:
    """Return the objects of all ranks on rank 0, and None on the others."""
    world = dist.get_world_size(group)
    if world == 1:
        return [local]
    objects: list[Any] | None = [None] * world if dist.get_rank() == 0 else None
    dist.gather_object(local, objects, dst=0, group=group)
    return objects


class BackgroundSaver:
    """Writes one checkpoint at a time in a thread, with its own process group. All ranks make the same calls.

    The thread updates the pointer `latest`. The run collects the result between steps.
    """

    def __init__(self) -> None:
        self._save: Save | None = None
        self._thread = threading.Thread()
        self._group: dist.ProcessGroup | None = None
        self._error: BaseException | None = None  # raised in the thread, other than a disk error
        self.write_s = 0.0  # seconds that the last checkpoint took

    @property
    def under_way(self) -> bool:
        """True from `start` until `wait` or `wait_on_error`."""
        return self._save is not None

    def start(self, save: Save, timeout: timedelta) -> None:
        """Start writing; a collective. timeout: for the collectives of the thread."""
        assert self._save is None
        if self._group is None and dist.get_world_size() > 1:
            self._group = dist.new_group(timeout=timeout, backend="gloo")
        self._save = save
        self._thread = threading.Thread(target=self._write, args=(save,), name="checkpoint", daemon=True)
        self._thread.start()

    def busy(self) -> bool:
        """Return whether any rank still writes; a collective if a save has started. Raises an error of the thread."""
        if self._save is None:
            return False
        writes = self._thread.is_alive()
        if self._error:
            raise self._error
        return bool(collectives.all_reduce_max({"writes": float(writes)})["writes"])

    def wait(self) -> Save | None:
        """Wait for the current save, if there is one, and return it; a collective. Raises NotWritten if it failed."""
        if self._save is None:
            return None
        self._thread.join()
        save, self._save = self._save, None
        if self._error:
            raise self._error
        save.raise_if_failed()
        return save

    def wait_on_error(self, warn: Callable[[str], None]) -> None:
        """Wait after an error has ended the run, without collectives and exceptions. Failures go to `warn`."""
        if self._save is None:
            return
        self._thread.join()
        error = self._save.error or " ".join(str(self._error or "").split())
        if error:
            warn(f"warning: {self._save.target}: cannot be written: {error}")
        self._save = None

    def seconds_to_come(self) -> float:
        """Estimate the seconds that the current save, if there is one, and the save at the end of the run will take."""
        return self.write_s * (1 + self.under_way)

    def _write(self, save: Save) -> None:
        begun = time.monotonic()
        try:
            save.write(self._group)
        except BaseException as e:  # raised again in the run's thread
            self._error = e
        self.write_s = time.monotonic() - begun


def find(root: Path) -> Path | None:
    """Return the newest complete checkpoint under root, or None.

    Folders of another name do not count. Raises UserError if the newest checkpoint is damaged, or missing although
    `latest` names it: continuing from an older one is the user's choice.
    """
    pointer = root / LATEST
    steps = list(folders.by_step(root))
    if pointer.is_file():
        name = pointer.read_text(encoding="utf-8", errors="replace").strip()
        latest = folders.step_of(name)
        if latest is None:
            raise UserError(
                f"{pointer}: contains {name!r}, which is not the name of a checkpoint; delete it to continue"
            )
        steps.append(latest)
    if not steps:
        return None

    # A crash after the folder was renamed leaves a complete checkpoint that is newer than the pointer.
    directory = root / folders.name_of(max(steps))
    if not directory.is_dir():
        raise UserError(f"{directory}: is missing; delete {pointer} to continue from an older checkpoint")
    if problem := folders.find_damage(directory):
        raise UserError(f"{directory}: {problem}; delete it and {pointer} to continue from an older checkpoint")
    return directory


def load(directory: Path, models: Sequence[ModelState]) -> None:
    """Restore weights and optimizer state bit for bit; a collective. The layout may differ from the saved one.

    With the distributed optimizer, only the data-parallel size may differ. Raises UserError if another size differs.
    """
    run = read_run(directory)
    stepped = run[STEPPED]
    saved_layout = run.get(LAYOUT)
    own_layout = _optimizer_layout(models)
    if stepped and saved_layout != own_layout:
        raise UserError(
            f"{directory}: its optimizer state was saved with {_describe(saved_layout)} and this run has "
            f"{_describe(own_layout)}; use the saved settings, or convert its weights (brorl convert to-hf) "
            "and start a new run from them"
        )
    with cpu_bridge.bridge():
        disabled_level = logging.root.manager.disable
        logging.disable(logging.WARNING)  # torch logs the traceback of an error before it raises the error
        try:
            state = dist_checkpointing.load(_states(models, stepped, loading=True), str(directory))
        except (CheckpointException, CheckpointingException, pickle.UnpicklingError, EOFError) as e:
            # torch's message has a traceback per rank, which ends with the reason.
            reason = str(e).rstrip().rpartition("\n")[2]
            errno_match = re.search(r"\[Errno (\d+)\]", reason)
            disk_failed = errno_match and int(errno_match[1]) != errno.ENOENT
            remedy = "fix that and run the command again" if disk_failed else "the checkpoint is damaged: delete it"
            raise UserError(f"{directory}: {reason}; {remedy}") from None
        finally:
            logging.disable(disabled_level)
        for model in models:
            model.restore(state[model.name] if model.name else state, directory)


def _optimizer_layout(models: Sequence[ModelState]) -> dict[str, int] | None:
    """Return the layout that the optimizer state requires, or None if it can be loaded under any layout."""
    if not any(model.optimizer and is_distributed(model.optimizer) for model in models):
        return None
    return {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
    }


def _describe(layout: dict[str, int] | None) -> str:
    if layout is None:
        return "parallel.distributed_optimizer = false"
    sizes = ", ".join(f"parallel.{name} = {size}" for name, size in layout.items())
    return f"parallel.distributed_optimizer = true, {sizes}"


def _states(models: Sequence[ModelState], stepped: Sequence[str], loading: bool = False) -> dict[str, Any]:
    """Return the actor's state, and those of the other models under their names."""
    states: dict[str, Any] = {}
    for model in models:
        state = model.sharded(model.name in stepped, loading)
        states |= {model.name: state} if model.name else state
    return states
