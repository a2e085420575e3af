"""run.dir/run.json: what a run was started with, on what, for those who read it later.

{"config": {section: {key: value}}, "starts": [{"time", "step", "command", "ranks", "machine", "versions", "changes"},
...]}: a start for every time that it was begun or resumed; the configuration is that of the last. "changes":
{section.key: [value in the checkpoint, value now]} of a run that was resumed.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_brorl import __version__
from megatron_brorl.signals import LAUNCHER

FILE = "run.json"
# Packages that decide what a run computes, where they are installed.
PACKAGES = [
    "torch",
    "megatron-core",
    "transformers",
    "tensorrt-llm",
    "transformer-engine",
    "reasoning-gym",
    "latex2sympy2_extended",
    "sympy",
    "numpy",
]


def write(
    folder: Path,
    config: Mapping[str, Any],
    resume_step: int | None,
    command: str,
    ranks: int,
    device: str,
    changes: Mapping[str, Any] | None = None,
) -> None:
    """Add a start to run.json.

    resume_step: that it continues from; None begins the file anew. device: in words. changes: keys whose values differ
    from those of the checkpoint, with both values.

    A disk that takes nothing is told of, and never ends a run.
    """
    # A resumed run adds a start to those before; a new run replaces the file.
    earlier = read(folder).get("starts", []) if resume_step is not None else []
    start = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "step": resume_step or 0,
        "command": command,
        "ranks": ranks,
        "machine": {"system": platform.platform(), "cores": os.cpu_count(), "device": device},
        "versions": versions(),
        "changes": changes or {},
    }

    path = folder / FILE
    aside = path.with_name(f".{FILE}.writing")
    # Replaced as a whole, so that no reader finds half a file.
    try:
        aside.write_text(json.dumps({"config": config, "starts": [*earlier, start]}, indent=1) + "\n", encoding="utf-8")
        aside.replace(path)
    except OSError as e:
        with contextlib.suppress(OSError):  # stderr may be a file on the same full disk
            print(f"warning: {path}: cannot be written: {e.strerror}; training goes on", file=sys.stderr, flush=True)


def read(folder: Path) -> dict[str, Any]:
    """What run.json says; {} where there is none, or it is not one: runs are older than this file."""
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def command(arguments: Sequence[str], ranks: int) -> str:
    """What a user types to start this command again, in a shell's words.

    A launcher of this package leaves its ranks their arguments without the number of them; any other is the user's.
    """
    own = ["--processes", str(ranks)] if LAUNCHER in os.environ else []
    return shlex.join(["brorl", arguments[0], *own, *arguments[1:]])


def versions() -> dict[str, str]:
    """Of this project, Python and the packages that decide what a run computes."""
    found = {"megatron-brorl": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
