"""The check whether a run has finished already. It reads small files only and imports no torch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from megatron_brorl.config.schema import Config
from megatron_brorl.errors import UserError
from megatron_brorl.files import read_object
from megatron_brorl.tracking import run_info

# Files that `brorl train` writes at its end.
_LEFT = ("summary.json", "model/config.json", "curves.png")


def finished(config: Config) -> str:
    """Return one line for the user if run.dir has a finished run of this configuration, else "".

    A run of another configuration continues (train.steps was raised) or is refused with the key that differs.
    """
    folder = Path(config.run.dir).absolute()
    if config.train.resume == "never" or not all((folder / name).exists() for name in _LEFT):
        return ""

    # Compared as JSON, with lists instead of tuples.
    asked, recorded = json.loads(json.dumps(dataclasses.asdict(config))), run_info.read(folder).get("config")
    if not isinstance(recorded, dict) or not isinstance(recorded.get("run"), dict):
        return ""
    # The folder may have been moved.
    asked["run"].pop("dir")
    recorded["run"].pop("dir", None)
    if asked != recorded:
        return ""

    # The end of the run writes a damaged file again.
    try:
        steps = read_object(folder / "summary.json").get("steps")
    except UserError:
        return ""

    return (
        f"run.dir = {config.run.dir}: this run has finished (steps: {steps}; its model is {folder / 'model'}); raise "
        "train.steps to continue it, or choose another run.dir"
    )
