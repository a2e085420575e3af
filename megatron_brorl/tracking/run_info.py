"""run.dir/run.json: the configuration of a run, and when and where it was started.

{"config": {section: {key: value}}, "starts": [{"time", "step", "command", "ranks", "machine", "versions", "changes"},
...]}: one start for each time that the run was begun or resumed. The configuration is that of the last start.
"changes" holds {section.key: [value in the checkpoint, value now]} of a resumed run.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_brorl import __version__
from megatron_brorl.errors import UserError, warn
from megatron_brorl.files import write_text
from megatron_brorl.signals import LAUNCHER

FILE = "run.json"
# Packages whose version may change the results of a run.
PACKAGES = (
    "torch", "megatron-core", "transformers", "tensorrt-llm", "transformer-engine", "reasoning-gym",
    "latex2sympy2_extended", "sympy", "numpy",
)  # fmt: skip


def write(
    folder: Path,
    config: Mapping[str, Any],
    resume_step: int | None,
    command: str,
    ranks: int,
    device: str,
    changes: Mapping[str, Any] | None = None,
) -> None:
    """Add a start to run.json. If that is not possible, print a warning, because the run can continue without it.

    resume_step: the step that the run continues from; None replaces the file. device: name of the device. changes: keys
    whose values differ from those of the checkpoint, with both values.
    """
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
    try:
        write_text(folder / FILE, json.dumps({"config": config, "starts": [*earlier, start]}, indent=1) + "\n")
    except UserError as e:
        warn(f"{e}; training continues")


def read(folder: Path) -> dict[str, Any]:
    """Return the content of run.json; {} if it is missing or damaged."""
    try:
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    config = content.get("config", {}) if isinstance(content, dict) else None
    return content if isinstance(config, dict) and all(isinstance(x, dict) for x in config.values()) else {}


def command(arguments: Sequence[str], ranks: int) -> str:
    """Return the shell command that starts this run again.

    `brorl --processes N` passes its arguments on to the ranks without N, so it is added. Another launcher, such as
    torchrun, is not part of the command.
    """
    launcher_options = ["--processes", str(ranks)] if LAUNCHER in os.environ else []
    return shlex.join(["brorl", arguments[0], *launcher_options, *arguments[1:]])


def versions() -> dict[str, str]:
    """Return the versions of this project, of Python and of PACKAGES that are installed."""
    installed = {"megatron-brorl": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return installed
