"""Experiment trackers in addition to metrics.jsonl: TensorBoard, Weights & Biases and MLflow.

A tracker only displays metrics, and metrics.jsonl records them. If a tracker fails, it is closed with a warning and the
run continues.
"""

from __future__ import annotations

import importlib.util
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from megatron_brorl.errors import UserError, shown
from megatron_brorl.tracking import metric_docs

PROJECT = "brorl"
IDS_FILE = ".trackers.json"  # in run.dir: the names under which a resumed run continues


class Tracker(Protocol):
    """One display of a run's metrics. Its methods may raise any exception."""

    name: str  # as in run.log

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step, counted from 1, all finite, by their tags."""

    def close(self) -> None:
        """Send the remaining metrics and close the tracker."""


def tag(name: str, file: str = "step") -> str:
    """Return a metric's name with its group in front, such as "policy/lr": trackers show each group as a section.

    file: "step", or "time" for a metric under the "time" key of metrics.jsonl.
    """
    documented = metric_docs.find(name, file)
    group = documented[0].group if documented else file
    return f"{group}/{name.removeprefix(f'{group}/').removeprefix(f'{group}_')}"


def check_installed(names: Sequence[str]) -> None:
    """Raise UserError naming the first tracker of run.log that is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(f'run.log: "{name}" is not installed: pip install {name}, or leave it out')


def open_trackers(
    names: Sequence[str], run_dir: Path, resume_step: int | None, config: Mapping[str, Any]
) -> list[Tracker]:
    """Return the trackers of run.log. Raises UserError if one cannot be opened.

    resume_step: the first step of a resumed run, which keeps its name, or None. config: values by section and key.
    """
    ids = _read_ids(run_dir) if resume_step is not None else {}
    ids.setdefault("name", f"{run_dir.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    trackers = []
    for name in names:
        try:
            trackers.append(_KINDS[name](run_dir, ids, resume_step, config))
        except Exception as e:  # a tracker's package may raise anything: no account, no network, no disk
            raise UserError(f'run.log: "{name}" cannot be opened: {shown(e)}; fix that, or leave it out') from None

    with suppress(OSError):  # without this file, a resumed run starts new tracker runs
        (run_dir / IDS_FILE).write_text(json.dumps(ids) + "\n", encoding="utf-8")
    return trackers


def _read_ids(run_dir: Path) -> dict[str, str]:
    try:
        ids = json.loads((run_dir / IDS_FILE).read_text(encoding="utf-8"))
        return {str(key): str(value) for key, value in ids.items()}
    except (OSError, ValueError, AttributeError):
        return {}


class _TensorBoard:
    name = "tensorboard"

    def __init__(self, run_dir: Path, ids: dict[str, str], resume_step: int | None, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        # TensorBoard's thread prints the traceback of an error that `log` also raises, such as a full disk.
        previous = threading.excepthook
        threading.excepthook = lambda e: None if type(e.thread).__module__.startswith("tensorboard") else previous(e)

        # Purge the steps from resume_step on, because the run writes them again.
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=(resume_step or 0) + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    name = "wandb"

    def __init__(self, run_dir: Path, ids: dict[str, str], resume_step: int | None, config: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=ids["name"],
            name=ids["name"],
            resume="allow",
            dir=str(run_dir),
            config=dict(config),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    name = "mlflow"

    def __init__(self, run_dir: Path, ids: dict[str, str], resume_step: int | None, config: Mapping[str, Any]) -> None:
        import mlflow

        # If the user names no server, the metrics go to a database in run.dir.
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            mlflow.set_tracking_uri(f"sqlite:///{run_dir.absolute() / 'mlflow.db'}")
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        self._mlflow = mlflow
        run_id = ids.get("mlflow")
        run = mlflow.start_run(run_id=run_id) if run_id else mlflow.start_run(run_name=ids["name"])
        ids["mlflow"] = run.info.run_id

        # The configuration is logged once; a store takes 100 parameters at a time.
        parameters = [] if run_id else [(f"{s}.{k}", str(v)) for s, values in config.items() for k, v in values.items()]
        for begin in range(0, len(parameters), 100):
            mlflow.log_params(dict(parameters[begin : begin + 100]))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


_KINDS: Mapping[str, Any] = {kind.name: kind for kind in (_TensorBoard, _Wandb, _Mlflow)}
