"""What a run has left in its directory, as Python has it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from megatron_brorl.errors import UserError
from megatron_brorl.rollout_log import FOLDER, Moment, moments, read_groups, read_rollouts
from megatron_brorl.tracking.metrics import METRICS_FILE, read_metrics

_SUMMARY = "summary.json"


@dataclass(frozen=True)
class RunRecord:
    """A run, finished or not."""

    directory: Path
    metrics: list[dict[str, Any]]  # a row per step, as metrics.jsonl has them
    summary: dict[str, Any] | None  # summary.json; None before the run's end

    @property
    def model(self) -> Path:
        """The trained model, a Hugging Face directory; there at the run's end."""
        return self.directory / "model"

    def moments(self) -> list[Moment]:
        """The steps and evaluations of which something is recorded, in the order of their files."""
        return moments(self.directory / FOLDER)

    def rollouts(self, number: int, kind: Literal["step", "evaluation"] = "step") -> pa.Table:
        """The recorded rollouts of a step (counted as in metrics) or evaluation; columns: docs/rollouts.md.

        Raises UserError where nothing is recorded of it.
        """
        return read_rollouts(self.directory / FOLDER, self._moment(kind, number))

    def groups(self, number: int, kind: Literal["step", "evaluation"] = "step") -> pa.Table:
        """A row per prompt of a step or evaluation. Raises UserError where nothing is recorded of it."""
        return read_groups(self.directory / FOLDER, self._moment(kind, number))

    def _moment(self, kind: Literal["step", "evaluation"], number: int) -> Moment:
        moment = Moment(kind, number)
        if moment not in self.moments():
            there = ", ".join(map(str, self.moments())) or "none"
            raise UserError(f"{self.directory / FOLDER}: nothing is recorded of {moment}; there are: {there}")
        return moment


def load_run(directory: str | Path) -> RunRecord:
    """The record of a run by its run.dir. Raises UserError where no step was done there, or a file is damaged."""
    directory = Path(directory)
    return RunRecord(directory, read_metrics(directory / METRICS_FILE), _summary(directory / _SUMMARY))


def _summary(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: cannot be read: {' '.join(str(e).split())}; delete it") from None
    return found
