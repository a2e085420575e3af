"""`brorl train` from a Python program: the same run, told what happens, with a function as its reward."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_brorl import signals
from megatron_brorl.api.runs import RunRecord, load_run
from megatron_brorl.cli import train as command
from megatron_brorl.cli.main import finished
from megatron_brorl.cli.session import Program
from megatron_brorl.config.load import load, load_table
from megatron_brorl.config.schema import Config
from megatron_brorl.files import check_outputs
from megatron_brorl.parallel import cpu_bridge
from megatron_brorl.rewards import custom
from megatron_brorl.rewards.custom import OwnReward
from megatron_brorl.tracking.metrics import METRICS_FILE
from megatron_brorl.train.callbacks import Callback, Callbacks

_BY_A_TABLE = "the tables"  # what messages call a configuration without a file


@dataclass(frozen=True)
class Trained(RunRecord):
    """What a call of train came to."""

    finished: bool  # False: stopped and saved; the same call goes on


def train(
    config: str | Path | Mapping[str, Mapping[str, Any]],
    *,
    overrides: Sequence[str] = (),
    reward: OwnReward | None = None,
    callbacks: Sequence[Callback | Any] = (),
) -> Trained:
    """Train in this process, from the newest checkpoint in run.dir where there is one, as `brorl train` does.

    config: a TOML file, or its tables as dicts ({"run": {"dir": ...}, ...}); overrides: "section.key=value", as on the
    command line. Alone the process is one rank; under torchrun every rank makes this call. Callbacks (Callback) are
    called on the main rank.

    reward: a function (response, row) -> finite number, or dict of reward, reason and parts, that judges every row
    which names no verifier. It runs in this process, one answer at a time: it may close over anything, but nothing
    limits its time or memory, and a fault that ends it ends the run; reward.timeout_s does not hold. A function in a
    file, data.verifier = "file.py:function", has processes of its own and limits, which suits long runs better. Its
    source's sha256 (else its compiled code's) is kept: a run is not resumed with another function. What it closes over
    is not seen.

    A run that has finished with this configuration and without a function as reward is returned as it is.

    Under torchrun the main rank writes the files: what other ranks return may lack their end.
    Raises UserError with the command line's line for mistakes, and where a callback has failed; the run is saved then.
    """
    loaded = _loaded(config, overrides)
    if reward is not None:
        custom.check_parameters(reward, "reward")
        # Rows that name no verifier name the function, and so does the fingerprint.
        loaded = replace(loaded, data=replace(loaded.data, verifier=custom.IN_PROCESS))

    # The function's source is not in the configuration: with one, the checkpoint decides whether it is the same run.
    elif told := finished(loaded):
        if os.environ.get("RANK", "0") == "0":
            print(told, file=sys.stderr)
        return _came_to(Path(loaded.run.dir), finished=True)

    # A rank of a launcher ends with it and heeds its signals; a notebook keeps its own.
    launched = "RANK" in os.environ
    if launched:
        signals.begin(saves=True)
    cpu_bridge.leave_out_compiler()
    again = f"megatron_brorl.train({'{...}' if isinstance(config, Mapping) else repr(str(config))}, ...)"
    status = command.execute(loaded, lambda _: again, Program(reward, Callbacks(callbacks), continues=not launched))
    return _came_to(Path(loaded.run.dir), finished=status == 0)


def _loaded(config: str | Path | Mapping[str, Mapping[str, Any]], overrides: Sequence[str]) -> Config:
    """The configuration, which writes over nothing that it reads."""
    if isinstance(config, Mapping):
        where, loaded = _BY_A_TABLE, load_table(_plain(config), _BY_A_TABLE, overrides)
    else:
        where, loaded = str(config), load(config, overrides)
    check_outputs(loaded, "train", where)
    return loaded


def _came_to(directory: Path, finished: bool) -> Trained:
    if not (directory / METRICS_FILE).is_file():  # stopped before its first step
        return Trained(directory, [], None, finished)
    found = load_run(directory)
    return Trained(directory, found.metrics, found.summary if finished else None, finished)


def _plain(value: Any) -> Any:
    """A copy with tuples as lists and paths as strings, as TOML has them."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value
