"""Whether the run that a command asks for has finished already. Reads small files only, and imports no torch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from megatron_brorl.config.schema import Config
from megatron_brorl.errors import UserError
from megatron_brorl.json_files import read_object
from megatron_brorl.record import run_record

# What `brorl train` leaves at its end; a run that lacks one of them does its end again.
_LEFT = ("summary.json", "model/config.json", "curves.png")
_OF_THE_JOB = ("dir", "started", "ends_at")  # keys of [run] that may differ: a folder may have been moved


def finished(config: Config) -> str:
    """Return one line for the user if run.dir holds a finished run of this very configuration, else "".

    A run of another configuration is not reported: it is continued (train.steps was raised) or refused with the key
    that differs.
    """
    folder = Path(config.run.dir).absolute()
    asked = json.loads(json.dumps(dataclasses.asdict(config)))  # lists instead of tuples, as in the file
    recorded = run_record.read(folder).get("config")
    if config.train.resume == "never" or not isinstance(recorded, dict) or not isinstance(recorded.get("run"), dict):
        return ""
    for sections in (asked, recorded):
        for key in _OF_THE_JOB:
            sections["run"].pop(key, None)
    if asked != recorded or not all((folder / name).exists() for name in _LEFT):
        return ""
    try:
        steps = read_object(folder / "summary.json").get("steps")
    except UserError:  # damaged: the end of the run writes it again
        return ""
    return (
        f"run.dir = {config.run.dir}: this run has finished ({steps} steps; its model is {folder / 'model'}); raise "
        "train.steps to continue it, or choose another run.dir"
    )
