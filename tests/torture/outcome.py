"""Reproducible outputs of a run, which depend only on its configuration and seed, and their comparison."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from megatron_brorl import rollout_log

_TIMED = ("job_seconds", "peak_rss_mib")  # keys of summary.json
_FILES = {"metrics": "metrics.jsonl", "summary": "metrics.jsonl", "records": "rollouts"}  # the file behind each part


@dataclass(frozen=True)
class Outcome:
    """Parts of a finished run, without wall-clock values."""

    metrics: list[dict[str, Any]]
    summary: dict[str, Any]
    records: dict[str, tuple[pa.Table, pa.Table]]  # groups and rollouts by moment
    weights: bytes

    @classmethod
    def read(cls, directory: Path) -> Outcome:
        """Return the outcome of the run in a directory."""
        lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((directory / "summary.json").read_text())
        folder = directory / rollout_log.FOLDER
        return cls(
            metrics=[{k: v for k, v in line.items() if k != "time"} for line in lines],
            summary={k: v for k, v in summary.items() if k not in _TIMED},
            records={
                str(m): (rollout_log.read_groups(folder, m), rollout_log.read_rollouts(folder, m))
                for m in rollout_log.moments(folder)
            },
            weights=(directory / "model" / "model.safetensors").read_bytes(),
        )

    def difference(self, directory: Path, messages: str, disk_fault: bool) -> str:
        """Return what differs in another run, or which temporary files it leaves behind; "" for nothing.

        messages: stderr of all its starts. A disk fault may cost a file that a warning names.
        """
        other = Outcome.read(directory)
        warned = [part for part, file in _FILES.items() if f"warning: {directory / file}:" in messages]
        differing = [part for part in vars(self) if getattr(self, part) != getattr(other, part)]
        if wrong := [part for part in differing if not (disk_fault and part in warned)]:
            return f"other {', '.join(wrong)}"
        left = [path.name for path in directory.rglob("*") if path.name.endswith((".writing", ".tmp"))]
        return f"left behind: {left}" if left and not disk_fault else ""
