"""Manage the run folder (run.dir): its lock, disk space and chat template date, and checks of a resumed run."""

from __future__ import annotations

import dataclasses
import datetime
import errno
import fcntl
import functools
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from megatron_brorl.checkpoints import folders
from megatron_brorl.checkpoints.adapters import BASE_WEIGHTS
from megatron_brorl.cli.memory_plan import amount, trained_weights, training_parts
from megatron_brorl.config.rules import may_change
from megatron_brorl.config.schema import Config
from megatron_brorl.data.source import TEMPLATE_DATE
from megatron_brorl.errors import UserError, shown
from megatron_brorl.families.shape import ModelShape
from megatron_brorl.files import write_text
from megatron_brorl.models.gpt import DTYPES
from megatron_brorl.parallel import collectives

LOCK = ".lock"
_WRITING_MARGIN = 1.05  # upper bound of the file size of a checkpoint, relative to the size of its tensors

Fingerprint = dict[str, dict[str, Any]]  # section -> key -> value, as in JSON
Changes = dict[str, tuple[Any, Any]]  # section.key -> values before and now
# Further sections of a fingerprint: the shapes of model and teacher, and the SHA-256 of functions and data.
_SHAPE = "shape"
_TEACHER_SHAPE = "teacher_shape"
_FUNCTIONS = "own_functions"
_INPUTS = "inputs"


def lock(directory: Path) -> TextIO:
    """Lock run.dir for this process, and create it if necessary. Raises UserError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = open(directory / LOCK, "w")  # noqa: SIM115  held until the process ends
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        raise _refused(directory, e) from None
    return handle


def check_writable(directory: Path) -> str:
    """Check whether `lock` would succeed, without changing anything. Raises UserError."""
    existing = _nearest_existing(directory)
    try:
        if not os.access(existing, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        if (directory / LOCK).exists():
            with open(directory / LOCK) as handle:  # closing it releases the lock
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        raise _refused(directory, e) from None
    return f"{directory} can be written" + ("" if existing == directory else f" (to be created in {existing})")


def _refused(directory: Path, error: OSError) -> UserError:
    reason = f"cannot be written: {error.strerror}; make it a writable folder"
    if isinstance(error, BlockingIOError):
        reason = "another run is writing there; choose another run.dir"
    return UserError(f"run.dir = {directory}: {reason}")


def checkpoint_bytes(config: Config, shape: ModelShape) -> int:
    """Return the size of a checkpoint: trained weights, Adam's moments and masters, also of critic and reference."""
    parts_of = functools.partial(training_parts, shape, stage=0, tensor=1, pipeline=1, dtype=DTYPES[config.model.dtype])
    actor = parts_of(lora=config.lora)
    models = [actor, *([parts_of()] if config.algo.advantage == "gae" else [])]
    reference = trained_weights(actor) if config.algo.kl_coef else 0
    return sum(trained_weights(parts) + parts["optimizer"] for parts in models) + reference


def check_disk(config: Config, shape: ModelShape, directory: Path) -> str:
    """Return the disk space that a run needs, in words. Raises UserError if there is not enough.

    The run needs the model and its checkpoints: train.keep_checkpoints, the best one (train.keep_best) and the one
    that is written before the oldest is deleted, less those that exist.
    """
    checkpoint = int(checkpoint_bytes(config, shape) * _WRITING_MARGIN)
    model_size = training_parts(shape, stage=0, tensor=1, pipeline=1, dtype=DTYPES[config.model.dtype])["weights"]

    max_checkpoints = config.train.keep_checkpoints + 1 + bool(config.train.keep_best)
    missing = max_checkpoints - len(folders.by_step(directory / "checkpoints"))
    need = checkpoint * max(missing, 1) + model_size
    free = shutil.disk_usage(_nearest_existing(directory)).free
    parts = f"checkpoints of {amount(checkpoint)}, {amount(model_size)} of the model"
    if need > free:
        raise UserError(
            f"run.dir = {directory}: needs {amount(need)} ({parts}) and {amount(free)} are free: free some, lower "
            "train.keep_checkpoints, or choose another run.dir"
        )
    return f"{amount(need)} of {amount(free)} that are free ({parts})"


def _nearest_existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    return next(p for p in (path, *path.parents) if p.exists())


def template_date(directory: Path) -> datetime.date | None:
    """Return the date that chat templates of this run.dir write into prompts, or None before the first start.

    Templates such as Llama 3's write today's date. A run that is resumed on another day, and an evaluation in the same
    run.dir, use the date of the first start. Raises UserError if the file holds no date, else OSError.
    """
    path = directory / TEMPLATE_DATE
    try:
        return datetime.date.fromisoformat(path.read_text(encoding="utf-8").strip())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        raise UserError(f"{path}: must hold a date such as 2026-01-31; delete it to take today's date") from None


def keep_template_date(directory: Path, date: datetime.date | None, is_main_rank: bool) -> None:
    """Write the date of this start if the template uses one; a collective. Raises UserError."""
    if date is None:
        return
    path = directory / TEMPLATE_DATE
    dates = sorted(set(collectives.all_gather(str(date))))
    if len(dates) > 1:  # one rank started before and another after midnight
        raise UserError(f"{path}: ranks started on different days, {' and '.join(dates)}: start the run again")
    if is_main_rank:
        write_text(path, f"{date}\n")


def fingerprint(
    config: Config,
    shape: ModelShape,
    own_functions: Mapping[str, str],
    inputs: Mapping[str, str] | None = None,
    teacher: ModelShape | None = None,
) -> Fingerprint:
    """Return the configuration of a run and the hashes of its inputs, which its checkpoints store.

    own_functions: the SHA-256 of the file of each verifier, advantage and policy loss of the user, by name. inputs: the
    SHA-256 of "tokenizer", "train" and "held_out" (Sources.digests), and the date of the chat template.
    """
    values = dataclasses.asdict(config)
    values |= {_SHAPE: dataclasses.asdict(shape), _FUNCTIONS: dict(own_functions), _INPUTS: dict(inputs or {})}
    values |= {_TEACHER_SHAPE: dataclasses.asdict(teacher) if teacher else {}}
    # Convert tuples to lists, as in a checkpoint's JSON.
    plain: Fingerprint = json.loads(json.dumps(values))
    return plain


def check_fingerprint(saved: Fingerprint, current: Fingerprint, where: Path, accept_functions: bool = False) -> Changes:
    """Return the keys in which a checkpoint (`where`) and this run differ.

    Raises UserError naming the first one that must not change (config.rules), with both values. accept_functions: the
    files of the user's functions may change.
    """
    changes: Changes = {}
    for section, values in current.items():
        before = saved.get(section, {})
        fixed = section in (_SHAPE, _TEACHER_SHAPE, _INPUTS) or (section == _FUNCTIONS and not accept_functions)
        for key, new in values.items():
            old = before.get(key)
            path = f"{section}.{key}"
            if key in before and old == new:
                continue
            if section == _FUNCTIONS and key not in before:
                continue  # algo.advantage or algo.policy_loss has changed, which is allowed
            # A checkpoint without the key was written by another version.
            if fixed or key not in before or not may_change(path, old, new, saved.get("rollout", {})):
                raise UserError(
                    f"{where}: was written with {_difference(section, key, old, new)}, or start a new run with another "
                    "run.dir"
                )
            changes[path] = (old, new)
    return changes


def change_line(changes: Changes) -> str:
    """Return the changes in words: "optim.lr = 1e-06 -> 5e-07, ..."."""
    return ", ".join(f"{path} = {shown(old)} -> {shown(new)}" for path, (old, new) in changes.items())


def _difference(section: str, key: str, old: Any, new: Any) -> str:
    hashes = f"(sha256 {str(old)[:12]}, now {str(new)[:12]})"
    if section == _FUNCTIONS:
        return f"another version of {key} {hashes}: --accept-changed-functions continues with it"
    if section == _INPUTS and key == TEMPLATE_DATE:
        return f"the date {old} in the prompts' chat template, now {new}: write {old} into run.dir/{key}"
    if section == _INPUTS and key == "tokenizer":
        return f"other tokenizer files in model.path {hashes}: restore them"
    if section == _INPUTS and key == BASE_WEIGHTS:
        return f"other base weights in model.path {hashes}: restore them"
    if section == _INPUTS:
        return f"other rows of data.{key} {hashes}: restore the data"
    if section in (_SHAPE, _TEACHER_SHAPE):
        path = "model.path" if section == _SHAPE else "teacher.path"
        return f"another model in {path} ({key} = {shown(old)}, now {shown(new)}): restore it"
    return f"{section}.{key} = {shown(old)}, now {shown(new)}: set it back"
