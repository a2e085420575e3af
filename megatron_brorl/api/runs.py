"""The files of a run, for Python programs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from megatron_brorl.errors import UserError
from megatron_brorl.files import read_object
from megatron_brorl.rollout_log import FOLDER, LogEntry, entries, read_groups, read_rollouts
from megatron_brorl.tracking.metrics import METRICS_FILE, read_metrics

_SUMMARY = "summary.json"


@dataclass(frozen=True)
class RunRecord:
    """A run. It may not have finished."""

    directory: Path
    metrics: list[dict[str, Any]]  # one row per step, as in metrics.jsonl
    summary: dict[str, Any] | None  # summary.json; None before the end of the run
    finished: bool  # False: the run was stopped and saved, or is still running

    @property
    def model(self) -> Path:
        """The Hugging Face directory of the trained model, which is written at the end of the run."""
        return self.directory / "model"

    def log_entries(self) -> list[LogEntry]:
        """Return the recorded steps and evaluations in order."""
        return entries(self.directory / FOLDER)

    def rollouts(self, number: int, kind: Literal["step", "evaluation"] = "step") -> pa.Table:
        """Return the stored rollouts of a step (counted as in metrics) or evaluation; columns: docs/rollouts.md.

        Raises UserError if nothing was recorded.
        """
        return read_rollouts(self.directory / FOLDER, self._log_entry(kind, number))

    def groups(self, number: int, kind: Literal["step", "evaluation"] = "step") -> pa.Table:
        """Return one row per prompt of a step or evaluation. Raises UserError if nothing was recorded."""
        return read_groups(self.directory / FOLDER, self._log_entry(kind, number))

    def _log_entry(self, kind: Literal["step", "evaluation"], number: int) -> LogEntry:
        entry = LogEntry(kind, number)
        if entry not in self.log_entries():
            known = ", ".join(f"{e.kind} {e.number}" for e in self.log_entries())
            raise UserError(f"{self.directory / FOLDER}: nothing is recorded of {kind} {number}; there are: {known}")
        return entry


def load_run(directory: str | Path) -> RunRecord:
    """Return the record of the run in `directory`, its run.dir.

    Raises UserError if no step was done there, or if a file is damaged.
    """
    directory = Path(directory)
    path = directory / _SUMMARY
    summary = read_object(path, "delete it") if path.is_file() else None
    return RunRecord(directory, read_metrics(directory / METRICS_FILE), summary, finished=summary is not None)
