"""`brorl train` from a Python program, with functions as reward, advantage and policy loss, and with callbacks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_brorl import signals
from megatron_brorl.algo.functions import IN_PROCESS
from megatron_brorl.api.runs import RunRecord, load_run
from megatron_brorl.cli import train as command
from megatron_brorl.cli.main import finished
from megatron_brorl.cli.session import Program
from megatron_brorl.config.load import load, load_table
from megatron_brorl.errors import UserError
from megatron_brorl.files import check_outputs
from megatron_brorl.parallel import cpu_bridge
from megatron_brorl.rewards import custom
from megatron_brorl.rewards.custom import RewardFunction
from megatron_brorl.tracking.metrics import METRICS_FILE
from megatron_brorl.train.callbacks import Callback, Callbacks


def train(
    config: str | Path | Mapping[str, Mapping[str, Any]],
    *,
    overrides: Sequence[str] = (),
    reward: RewardFunction | None = None,
    group_reward: Callable[..., Any] | None = None,
    advantage: Callable[..., Tensor] | None = None,
    policy_loss: Callable[..., Tensor] | None = None,
    environment: type | None = None,
    agent: Callable[..., Any] | None = None,
    callbacks: Sequence[Callback | Any] = (),
    accept_changed_functions: bool = False,
) -> RunRecord:
    """Train in this process like `brorl train`, from the newest checkpoint in run.dir if there is one.

    config: a TOML file, or its tables as dicts ({"run": {"dir": ...}, ...}). overrides: "section.key=value", as on the
    command line. Without a launcher the process is the only rank. Under torchrun, every rank must make this call.
    Callbacks (Callback) are called on the main rank.

    reward: a function (response, row) that scores every row which names no verifier. It returns a finite number, or a
    dict with reward, reason and parts. It runs in this process, one answer at a time. Nothing limits its time or
    memory, and a crash ends the run. For long runs, use a function in a file, data.verifier = "file.py:function",
    which runs in separate processes with limits. A hash of the function's source (or compiled code) is kept, and a run
    cannot be resumed with another function unless accept_changed_functions is set. Changes of the variables that it
    uses are not detected.

    group_reward, advantage, policy_loss: functions in place of reward.group_function, algo.advantage and
    algo.policy_loss (docs/extending.md). environment: a class in place of environment.factory, one thread per call.
    agent: a function in place of agent.function, in an event loop or a thread of its own. All of them run in this
    process without limits of time or memory.

    A finished run of the same configuration without a function or class is returned without training.

    Only the main rank writes the files, so the record of another rank may lack the last of them. Raises UserError for
    the mistakes that the command reports, and if a callback fails. In the latter case the run is saved first.
    """
    functions = {"algo.advantage": advantage, "algo.policy_loss": policy_loss, "reward.group_function": group_reward}
    algorithm = {key: function for key, function in functions.items() if function is not None}
    overrides = [*overrides, *(f"{key}={IN_PROCESS[key]}" for key in algorithm)]
    if environment is not None:
        overrides.append(f"environment.factory=this_process:{environment.__name__}")
    if agent is not None:
        overrides.append(f"agent.function=this_process:{agent.__name__}")

    is_table = isinstance(config, Mapping)
    where = "the tables" if is_table else str(config)
    loaded = load_table(_as_toml(config), where, overrides) if isinstance(config, Mapping) else load(config, overrides)
    check_outputs(loaded, "train", where)
    directory = Path(loaded.run.dir)
    if reward is not None:
        custom.check_parameters(reward, "reward")
        # Rows that name no verifier, and the fingerprint of the run, name the function.
        loaded = replace(loaded, data=replace(loaded.data, verifier=custom.IN_PROCESS))
    # With a function, the checkpoint decides whether it is the same run, because run.json does not have its source.
    if not (reward or algorithm or environment or agent) and (message := finished(loaded)):
        if os.environ.get("RANK", "0") == "0":
            print(message, file=sys.stderr)
        return _record(directory, has_finished=True)

    # A rank of a launcher ends with it and handles its signals. A notebook keeps its own signal handlers.
    launched = "RANK" in os.environ
    if launched:
        signals.install(saves=True)
    cpu_bridge.order_kernels(loaded.parallel)
    cpu_bridge.disable_compiler()
    call_text = f"megatron_brorl.train({'{...}' if is_table else repr(where)}, ...)"
    program = Program(
        reward=reward,
        algorithm=algorithm,
        callbacks=Callbacks(callbacks),
        environment=environment,
        agent=agent,
        accept_changed_functions=accept_changed_functions,
        continues=not launched,
    )
    try:
        status = command.execute(loaded, lambda _: call_text, program)
    except UserError as e:
        # A user cannot act on frames of this package, so the exception is raised again without them.
        raise e.with_traceback(None) from e.__cause__
    return _record(directory, has_finished=status == 0)


def _record(directory: Path, has_finished: bool) -> RunRecord:
    if not (directory / METRICS_FILE).is_file():  # stopped before the first step
        return RunRecord(directory, metrics=[], summary=None, finished=has_finished)
    record = load_run(directory)
    return replace(record, summary=record.summary if has_finished else None, finished=has_finished)


def _as_toml(value: Any) -> Any:
    """Return a copy with tuples as lists and paths as strings, as in a TOML file."""
    if isinstance(value, Mapping):
        return {key: _as_toml(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_toml(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value
