"""The folders of a run's checkpoints: names, pointers, manifests and rotation.

    checkpoints/step_00000003/   a checkpoint; manifest.json has the SHA-256 of every other file
    checkpoints/latest           the name of the newest complete checkpoint
    checkpoints/best             the name of the best checkpoint; then a line with metric and value: pass_at_1 0.6125

Any other file there belongs to the user. Megatron loads a checkpoint with a flipped byte without an error, hence the
manifest. run.json repeats the content of `best`, because a run may be killed after the checkpoint, but before `best`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_brorl.checkpoints.writer import write_verified
from megatron_brorl.errors import UserError, shown
from megatron_brorl.files import read_object, sha256

LATEST = "latest"
BEST = "best"
MANIFEST = "manifest.json"
RUN = "run.json"
# Keys of run.json.
STEP = "step"
LAYOUT = "optimizer_layout"  # the parallel sizes that a distributed optimizer's state needs, or null
STEPPED = "optimizers_that_have_stepped"  # names of the models whose optimizer has stepped


@dataclass(frozen=True)
class Best:
    """The best checkpoint by a held-out metric."""

    step: int
    metric: str  # as in train.keep_best
    value: float


def name_of(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step whose checkpoint has exactly this name, or None."""
    match = re.fullmatch("step_([0-9]{8,})", name)
    return int(match[1]) if match and name_of(int(match[1])) == name else None


def by_step(root: Path) -> dict[int, Path]:
    """Return the folders that are named like checkpoints, by step."""
    folders = ((step_of(path.name), path) for path in root.glob("step_*") if path.is_dir() and not path.is_symlink())
    return {step: path for step, path in folders if step is not None}


def read_run(directory: Path) -> dict[str, Any]:
    """Return the run.json of a checkpoint. Raises UserError."""
    return read_object(directory / RUN, f"delete {directory} to continue from an older checkpoint")


def repair(root: Path, step: int, keep: int) -> None:
    """Finish a save of this step that was killed after it had renamed its folder. Raises OSError."""
    latest = read_pointer(root / LATEST)
    if latest is None or latest < step:
        write_pointer(root / LATEST, name_of(step))
    if latest is None or latest <= step:  # otherwise a later checkpoint exists
        rotate(root, step, keep)
    remove_unfinished(root)


def remove_unfinished(root: Path) -> None:
    """Delete the temporary files and folders of killed saves."""
    for path in root.glob(".*.writing"):
        name = path.name.removeprefix(".").removesuffix(".writing")
        if step_of(name) is None and name not in (LATEST, BEST):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def rotate(root: Path, step: int, keep: int) -> None:
    """Delete all checkpoints up to `step` except the newest `keep` and the best one."""
    checkpoints = by_step(root)
    best = read_pointer(root / BEST)
    for old in sorted(s for s in checkpoints if s <= step)[:-keep]:
        if old != best:
            shutil.rmtree(checkpoints[old])


def read_pointer(path: Path) -> int | None:
    """Return the step of the checkpoint that a pointer names, or None if it names none."""
    try:
        first_line = path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    except OSError:
        return None
    return step_of(first_line.strip())


def resolve(path: Path) -> Path:
    """Return the checkpoint if path is a pointer such as runs/x/checkpoints/best, otherwise path. Raises UserError."""
    if path.name not in (LATEST, BEST) or not path.is_file():
        return path
    step = read_pointer(path)
    if step is None:
        raise UserError(f"{path}: does not name a checkpoint; give the folder of one")
    return path.with_name(name_of(step))


def write_pointer(path: Path, name: str) -> None:
    """Write the name of a checkpoint to a pointer file, atomically. Raises OSError."""
    aside = path.with_name(f".{path.name}.writing")
    with aside.open("w", encoding="utf-8") as f:
        f.write(name + "\n")
        f.flush()
        os.fsync(f.fileno())
    aside.rename(path)


def write_best(root: Path, best: Best) -> None:
    """Write the pointer `best`. Raises OSError."""
    write_pointer(root / BEST, f"{name_of(best.step)}\n{best.metric} {best.value!r}")


def read_best(root: Path) -> Best | None:
    """Return the content of `best`, or None if the file is missing or malformed."""
    with contextlib.suppress(OSError, ValueError):
        name, score = (root / BEST).read_text(encoding="utf-8").splitlines()
        metric, value = score.split()
        if (step := step_of(name)) is not None:
            return Best(step, metric, float(value))
    return None


def best_so_far(root: Path, stored: Best | None, step: int, metric: str) -> Best | None:
    """Return the best checkpoint on the disk up to `step`, for a run that continues from there.

    stored: the best checkpoint in run.json of that step. metric: checkpoints kept for another metric do not count.
    """
    on_disk = by_step(root)
    valid = [b for b in (read_best(root), stored) if b and b.metric == metric and b.step <= step and b.step in on_disk]
    return max(valid, key=lambda b: (b.value, -b.step), default=None)


def write_manifest(directory: Path, digests: Mapping[str, str] | None = None) -> None:
    """Write manifest.json, after all other files.

    digests: SHA-256 by file name. None computes them from the files on the disk. Raises OSError.
    """
    if digests is None:
        digests = {p.relative_to(directory).as_posix(): sha256(p) for p in directory.rglob("*") if p.is_file()}
    text = json.dumps(dict(sorted(digests.items())), indent=1).encode()
    write_verified(directory / MANIFEST, lambda stream: stream.write(text))


def find_damage(directory: Path) -> str:
    """Return the first difference between a directory and its manifest as text, or "".

    Raises OSError if the disk fails, because the directory may still be intact.
    """
    path = directory / MANIFEST
    if not path.is_file():
        return f"{MANIFEST} is missing"
    try:
        manifest = read_object(path)
    except UserError:
        return f"{MANIFEST} is not readable"
    for name, digest in manifest.items():
        if not (name.isprintable() and len(name) <= 255 and (directory / name).is_file()):
            return f"{shown(name)[1:-1]} is missing"  # without the quotes of shown()
        if sha256(directory / name) != digest:
            return f"{name} is damaged (its SHA-256 differs from the manifest)"
    return ""
