"""The folders of a run's checkpoints: their names, what lies among them that is not ours, and which of them go."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from megatron_brorl.errors import UserError
from megatron_brorl.json_files import read_object

LATEST, BEST = "latest", "best"  # pointers: files whose first line is the name of a checkpoint
RUN = "run.json"
STEP = "step"  # key of run.json: steps done
LAYOUT = "optimizer_layout"  # key of run.json: sizes that a distributed optimizer's state is bound to, or null
STEPPED = "optimizers_that_have_stepped"  # key of run.json: names of parts


def name_of(step: int) -> str:
    """The name of a step's checkpoint."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """The step whose checkpoint has exactly this name."""
    found = re.fullmatch("step_([0-9]{8,})", name)
    return int(found[1]) if found and name_of(int(found[1])) == name else None


def by_step(root: Path) -> dict[int, Path]:
    """The folders that have the name of a step, by step."""
    named = ((step_of(path.name), path) for path in root.glob("step_*"))
    return {step: path for step, path in named if step is not None and path.is_dir()}


def stored_step(directory: Path) -> int | None:
    """The step of a folder's run.json; None where it cannot be read."""
    try:
        step = read_run(directory)[STEP]
    except (UserError, KeyError):
        return None
    return step if type(step) is int else None


def repair(root: Path, step: int, keep: int) -> None:
    """Do what a save of this step has left undone that was killed once its folder was in place. Raises OSError."""
    named = pointed(root / LATEST)
    if named is None or named < step:
        point(root / LATEST, name_of(step))
    if named is None or named <= step:  # else a later one is the newest
        rotate(root, step, keep)
    remove_unfinished(root)


def remove_unfinished(root: Path) -> None:
    """Delete what a save that was killed left."""
    for path in root.glob(".*.writing"):
        name = path.name.removeprefix(".").removesuffix(".writing")
        if step_of(name) is None and name not in (LATEST, BEST):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def give_way(target: Path, step: int) -> None:
    """Rename what has the name of the checkpoint that is about to be put in place, but is none of that step."""
    ours = target.is_dir() and not target.is_symlink() and stored_step(target) == step
    if ours or not (target.exists() or target.is_symlink()):
        return
    number = 1
    while (aside := target.with_name(f"{target.name}.{number}")).exists() or aside.is_symlink():
        number += 1
    target.rename(aside)
    print(f"warning: {target}: is no checkpoint of step {step}; it is now {aside.name}", file=sys.stderr, flush=True)


def is_own(root: Path, step: int) -> bool:
    """Whether the folder with the name of a step is a checkpoint of it that a run has written here."""
    # A link's target lies elsewhere, and a folder whose run.json is gone or of another step is no checkpoint of ours.
    directory = root / name_of(step)
    return directory.is_dir() and not directory.is_symlink() and stored_step(directory) == step


def rotate(root: Path, step: int, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints up to `step` and the one that `best` names.

    Never what save did not write, nor a later one.
    """
    own = [s for s in by_step(root) if s <= step and is_own(root, s)]
    best = pointed(root / BEST)
    for old in sorted(own)[:-keep]:
        if old != best:
            shutil.rmtree(root / name_of(old))


def pointed(path: Path) -> int | None:
    """The step whose checkpoint a pointer names; None where there is no such file, or no such name in it."""
    try:
        first = path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    except OSError:
        return None
    return step_of(first.strip())


def followed(path: Path) -> Path:
    """The checkpoint, where path is a pointer: runs/x/checkpoints/best. Raises UserError where that names none."""
    if path.name not in (LATEST, BEST) or not path.is_file():
        return path
    step = pointed(path)
    if step is None:
        raise UserError(f"{path}: names no checkpoint; give the folder of one")
    return path.with_name(name_of(step))


def read_run(directory: Path) -> dict[str, Any]:
    """What save was given as `run`, and the names of the optimizers that had stepped. Raises UserError."""
    return read_object(directory / RUN, f"delete {directory} to go on from an older checkpoint")


def point(path: Path, name: str) -> None:
    """Let a pointer name a checkpoint; it says the old one or the new one at any instant. Raises OSError."""
    aside = path.with_name(f".{path.name}.writing")
    with aside.open("w", encoding="utf-8") as f:
        f.write(name + "\n")
        f.flush()
        os.fsync(f.fileno())
    aside.rename(path)
