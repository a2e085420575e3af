"""run.dir: taken by one run alone, looked at without touching it, and the room that a run takes on its disk."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import TextIO

from megatron_brorl.checkpoints import folders
from megatron_brorl.checkpoints.training import WRITING_MARGIN
from megatron_brorl.config.schema import Config
from megatron_brorl.errors import UserError
from megatron_brorl.model_shape import ModelShape
from megatron_brorl.models.gpt import DTYPES
from megatron_brorl.models.memory import amount, training_parts
from megatron_brorl.train.record import MAX_TOKENS

LOCK = ".lock"
_RECORD_BYTES = 16  # of one that people can read, at most: log-probability, entropy, text


def take(directory: Path) -> TextIO:
    """Lock it for this process, and make it where it is not there. Raises UserError where that cannot be."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = open(directory / LOCK, "w")  # noqa: SIM115  held until the process ends
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        raise _refused(directory, e) from None
    return handle


def look(directory: Path) -> str:
    """Whether `take` would do, in words, and nothing is changed. Raises UserError where it would not."""
    there = _nearest(directory)
    try:
        # What root may do says nothing of a disk that is mounted to be read.
        if os.statvfs(there).f_flag & os.ST_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        if not there.is_dir():
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(there, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        if (directory / LOCK).exists():
            with open(directory / LOCK) as handle:  # its lock ends with it
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        raise _refused(directory, e) from None
    return f"{directory} can be written" + ("" if there == directory else f" (to be made in {there})")


def checkpoint_bytes(config: Config, shape: ModelShape) -> int:
    """Of one checkpoint: weights, Adam's moments and masters, of the critic too."""
    parts = training_parts(shape, 0, 1, 1, DTYPES[config.model.dtype])
    models = 2 if config.algo.advantage == "gae" else 1
    reference = parts["weights"] if config.algo.kl_coef else 0
    return models * (parts["weights"] + parts["optimizer"]) + reference


def room_of(config: Config, shape: ModelShape, directory: Path) -> str:
    """What a run takes on the disk and what is free, in words. Raises UserError where it would not fit.

    Checkpoints: train.keep_checkpoints, the best (train.keep_best) and the one that is written before the oldest goes,
    less those that are there. The rollouts that people can read are named beside it.
    """
    t, r = config.train, config.rollout
    # Of tensors, with what is written around them.
    one = int(checkpoint_bytes(config, shape) * WRITING_MARGIN)
    model = training_parts(shape, 0, 1, 1, DTYPES[config.model.dtype])["weights"]  # run.dir/model

    # At most as many checkpoints as are written at all, and never fewer than the next one.
    written = -(-t.steps // t.checkpoint_every) if t.checkpoint_every else 1
    most = min(t.keep_checkpoints + 1 + bool(t.keep_best), max(written, 1) + bool(t.keep_best))
    there = len(folders.by_step(directory / "checkpoints"))
    checkpoints = one * max(most - there, 1)

    shown = min(MAX_TOKENS, config.run.record_groups * r.n * r.max_tokens) * _RECORD_BYTES

    # Refused for what it takes in any case: few responses are as long as they may be.
    need, free = checkpoints + model, shutil.disk_usage(_nearest(directory)).free
    parts = f"checkpoints of {amount(one)}, {amount(model)} of the model"
    if need > free:
        raise UserError(
            f"run.dir = {directory}: needs {amount(need)} ({parts}) and {amount(free)} are free: free some, lower "
            "train.keep_checkpoints, or choose another run.dir"
        )
    return f"{amount(need)} of {amount(free)} that are free ({parts}); each step keeps up to {amount(shown)} to read"


def _nearest(path: Path) -> Path:
    """The path itself, or the folder around it that is there."""
    return next(p for p in (path, *path.parents) if p.exists())


def _refused(directory: Path, error: OSError) -> UserError:
    why = f"cannot be written: {error.strerror}; make it a writable folder"
    if isinstance(error, BlockingIOError):
        why = "another run is writing there; choose another run.dir"
    return UserError(f"run.dir = {directory}: {why}")
