"""Where figures go besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow, Trackio, each where it is installed.

A board is a display, never the record: one that fails is given up with a warning, and the run goes on.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from megatron_brorl.errors import UserError
from megatron_brorl.glossary.tables import OF_A_STEP, OF_TIME, find

PROJECT = "brorl"
IDS_FILE = ".boards.json"  # in run.dir: by which names a resumed run goes on where it was
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}


class Board(Protocol):
    """One display of a run's figures."""

    name: str  # as run.log has it

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Show the figures of a step, all finite, by their tags; may raise anything."""

    def close(self) -> None:
        """Send what is left; may raise anything."""


def tag(name: str, timed: bool = False) -> str:
    """A figure's name behind the group that the glossary has it in: "policy/lr". Displays make a section of each group.

    timed: one of those under "time" in metrics.jsonl.
    """
    found = find(name, OF_TIME if timed else OF_A_STEP)
    group = found[0].group if found else "time" if timed else "step"
    return f"{group}/{name.removeprefix(f'{group}/').removeprefix(f'{group}_')}"


def check_installed(names: Sequence[str]) -> None:
    """Raise UserError naming the first of run.log that is not installed."""
    for name in names:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise UserError(f'run.log: "{name}" is not installed: pip install {PACKAGES[name]}, or leave it out')


def open_boards(names: Sequence[str], run_dir: Path, resume_step: int | None, config: Mapping[str, Any]) -> list[Board]:
    """The boards of run.log. Raises UserError for one that cannot be opened.

    resume_step: see metrics.Lines; a run that goes on does so under the name that it had. config: of the run, by
    section and key.
    """
    check_installed(names)
    ids = _read_ids(run_dir) if resume_step is not None else {}
    ids.setdefault("name", f"{run_dir.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    boards = []
    for name in names:
        try:
            boards.append(_KINDS[name](run_dir, ids, resume_step, config))
        except Exception as e:  # of a package that is none of ours: no account, no network, no disk
            reason = " ".join(str(e).split()) or type(e).__name__
            raise UserError(f'run.log: "{name}" cannot be opened: {reason}; mend it, or leave it out') from None

    with suppress(OSError):  # a resumed run would then begin anew on its boards
        (run_dir / IDS_FILE).write_text(json.dumps(ids) + "\n", encoding="utf-8")
    return boards


def _read_ids(run_dir: Path) -> dict[str, str]:
    try:
        ids = json.loads((run_dir / IDS_FILE).read_text(encoding="utf-8"))
        return {str(key): str(value) for key, value in ids.items()}
    except (OSError, ValueError, AttributeError):  # of a run that is older than this file
        return {}


class _TensorBoard:
    name = "tensorboard"

    def __init__(self, run_dir: Path, ids: dict[str, str], resume_step: int | None, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # here because it takes a second to import

        # Steps that will be written again are no longer shown.
        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=resume_step or 0)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()

    def close(self) -> None:
        self._board.close()


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

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    name = "mlflow"

    def __init__(self, run_dir: Path, ids: dict[str, str], resume_step: int | None, config: Mapping[str, Any]) -> None:
        import mlflow

        # A server that the user names, or a database beside the run.
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            mlflow.set_tracking_uri(f"sqlite:///{run_dir.absolute() / 'mlflow.db'}")
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        self._mlflow = mlflow
        known = ids.get("mlflow")
        run = mlflow.start_run(run_id=known) if known else mlflow.start_run(run_name=ids["name"])
        ids["mlflow"] = run.info.run_id

        # What a run is made of is told once; a store takes 100 parameters at a time.
        keys = [(f"{s}.{k}", str(v)) for s, values in config.items() for k, v in values.items()] if not known else []
        for begin in range(0, len(keys), 100):
            mlflow.log_params(dict(keys[begin : begin + 100]))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(figures), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class _Trackio:
    name = "trackio"

    def __init__(self, run_dir: Path, ids: dict[str, str], resume_step: int | None, config: Mapping[str, Any]) -> None:
        import trackio

        self._run = trackio.init(project=PROJECT, name=ids["name"], resume="allow", config=dict(config))
        self._trackio = trackio

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._trackio.log(dict(figures), step=step)

    def close(self) -> None:
        self._trackio.finish()


_KINDS: Mapping[str, Any] = {kind.name: kind for kind in (_TensorBoard, _Wandb, _Mlflow, _Trackio)}


def warn(board: str, error: Exception) -> None:
    """Say that a board is given up."""
    with suppress(OSError):  # stderr may be a file on a full disk
        reason = " ".join(str(error).split()) or type(error).__name__
        print(f"warning: run.log: {board}: {reason}; no more figures go there in this run", file=sys.stderr, flush=True)
