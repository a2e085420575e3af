"""What a run came to, and whether another came to the same."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from torture import hurt

from megatron_brorl.record import files as records

_TIMED = ("job_seconds", "peak_rss_mib")  # of summary.json
_FILES = {  # what is made of what
    "figures": "metrics.jsonl", "summary": "metrics.jsonl", "rollout log": "rollouts.jsonl", "records": "rollouts",
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """Figures without times, and everything else that is a function of configuration and seed."""

    figures: list[dict[str, Any]]
    summary: dict[str, Any]
    log: list[str]  # rollouts.jsonl
    records: dict[str, tuple[pa.Table, pa.Table]]  # groups and rollouts by moment
    weights: bytes
    folder: Path

    def against(self, directory: Path, what: str, said: str, exact: bool) -> str:
        """What differs in the run that was hurt, or lies about in its folder; "" for nothing.

        said: by all of its processes. exact: bit by bit, but for what it cannot be.
        """
        other = outcome(directory)
        # What a process that was lost is counted in.
        ours, theirs = _uncounted(self.figures), _uncounted(other.figures)
        if what == "freeze a scoring process" and any(line["verdict_timeouts"] for line in other.figures):
            return ""  # an answer is lost, and said to be: another run, which has to end
        if not exact:
            return _unlike(ours, theirs, self.folder, directory)

        same = {
            "weights": self.weights == other.weights,
            "figures": ours == theirs,
            "summary": self.summary == other.summary,
            "rollout log": self.log == other.log,
            "records": _same_records(self.records, other.records),
        }
        # What the disk did not take the run does without, and says so.
        told = [name for name, file in _FILES.items() if f"warning: {directory / file}:" in said]
        wrong = [name for name, alike in same.items() if not alike and not (what in hurt.FAULTS and name in told)]
        if wrong:
            return f"other {', '.join(wrong)}"
        endings = (".writing", ".tmp", "unfinished_step")
        left = [path.name for path in directory.rglob("*") if path.name.endswith(endings)]
        # A disk that refuses to remove a file keeps it.
        return f"left behind: {left}" if left and what not in hurt.FAULTS else ""


def outcome(directory: Path) -> Outcome:
    """What a run came to."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((directory / "summary.json").read_text())
    folder = directory / records.FOLDER
    moments = records.moments(folder)
    found = {str(m): (records.read_groups(folder, m), records.read_rollouts(folder, m)) for m in moments}
    return Outcome(
        figures=[{k: v for k, v in line.items() if k != "time"} for line in lines],
        summary={k: v for k, v in summary.items() if k not in _TIMED},
        log=(directory / "rollouts.jsonl").read_text().splitlines(),
        records=found,
        weights=(directory / "model" / "model.safetensors").read_bytes(),
        folder=directory,
    )


def _uncounted(figures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k != "reward_worker_restarts"} for line in figures]


def _same_records(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return ours.keys() == theirs.keys() and all(
        a.equals(b) for moment in ours for a, b in zip(ours[moment], theirs[moment], strict=True)
    )


def _unlike(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], a: Path, b: Path) -> str:
    """The same rollouts and updates; log-probs may differ in their last bits, with the rows that share a batch."""
    for x, y in zip(ours, theirs, strict=True):
        x, y = ({k: math.nan if v is None else v for k, v in row.items() if k != "nonfinite"} for row in (x, y))
        if x["reward"] != y["reward"] or x != pytest.approx(y, rel=1e-3, abs=1e-4, nan_ok=True):
            return f"other figures in step {x['step']}"
    first, second = (load_file(d / "model" / "model.safetensors") for d in (a, b))
    far = [n for n, t in first.items() if not torch.allclose(t, second[n], atol=2e-5, rtol=1e-3)]
    return f"other weights: {far[:3]}" if far else ""
