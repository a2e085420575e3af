"""Whether the run that a command asks for has finished already. Reads small files only, and imports no torch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from megatron_brorl.config.schema import Config
from megatron_brorl.errors import UserError
from megatron_brorl.files import read_object
from megatron_brorl.record import run_record

# What `brorl train` leaves at its end.
_LEFT = ("summary.json", "model/config.json", "curves.png")


def finished(config: Config) -> str:
    """Return one line for the user if run.dir holds a finished run of this very configuration, else "".

    A run of another configuration is not reported: it is continued (train.steps was raised) or refused with the key
    that differs.
    """
    # A run that was killed while it wrote its end does that part again.
    folder = Path(config.run.dir).absolute()
    if config.train.resume == "never" or not all((folder / name).exists() for name in _LEFT):
        return ""

    # The configuration is compared as JSON has it, with lists instead of tuples.
    asked, recorded = json.loads(json.dumps(dataclasses.asdict(config))), run_record.read(folder).get("config")
    if not isinstance(recorded, dict) or not isinstance(recorded.get("run"), dict):
        return ""
    # The folder may have been moved.
    asked["run"].pop("dir")
    recorded["run"].pop("dir", None)
    if asked != recorded:
        return ""

    # A damaged file is written again by the end of the run.
    try:
        steps = read_object(folder / "summary.json").get("steps")
    except UserError:
        return ""

    return (
        f"run.dir = {config.run.dir}: this run has finished (steps: {steps}; its model is {folder / 'model'}); raise "
        "train.steps to continue it, or choose another run.dir"
    )
