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

LATEST = "latest"
RUN = "run.json"
STEP = "step"  # key of run.json: steps done
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


def remove_unfinished(root: Path) -> None:
    """Delete what a save that was killed left."""
    for path in root.glob(".step_*.writing"):
        if step_of(path.name.removeprefix(".").removesuffix(".writing")) is None:
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


def rotate(root: Path, step: int, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints up to `step`; never what save did not write, nor a later one."""
    # A link's target lies elsewhere, and a folder whose run.json is gone or of another step is no checkpoint of ours.
    own = [s for s, d in by_step(root).items() if s <= step and not d.is_symlink() and stored_step(d) == s]
    for old in sorted(own)[:-keep]:
        shutil.rmtree(root / name_of(old))


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
