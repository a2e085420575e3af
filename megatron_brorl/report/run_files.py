"""What a run left in run.dir, read for its report: whatever is missing is missing, not a mistake."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from megatron_brorl.errors import UserError
from megatron_brorl.json_files import read_object
from megatron_brorl.metrics import METRICS_FILE, read_metrics
from megatron_brorl.record import run_record
from megatron_brorl.record.files import FOLDER, Moment, moments, read_groups, read_rollouts

SUMMARY = "summary.json"
Row = Mapping[str, Any]


@dataclass(frozen=True)
class RunFiles:
    """A run, still going or ended."""

    folder: Path
    rows: list[Row]  # lines of metrics.jsonl
    summary: Row  # {} until the run has ended
    config: Mapping[str, Any]  # section -> key -> value; {}: not recorded
    starts: list[Row]  # of run.json
    moments: list[Moment]  # at which rollouts were recorded, steps before evaluations

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.folder.name

    @property
    def steps(self) -> int:
        """That are done."""
        return int(self.summary.get("steps", self.rows[-1]["step"] + 1 if self.rows else 0))

    def key(self, section: str, name: str, default: Any) -> Any:
        """A value of the configuration, where it is known."""
        return self.config.get(section, {}).get(name, default)

    def of_kind(self, kind: str) -> list[Moment]:
        """Its steps, or its evaluations, in order."""
        return [m for m in self.moments if m.kind == kind]

    def groups(self, moment: Moment) -> pa.Table:
        """record.schema.GROUPS of a moment. Raises UserError where the file is damaged."""
        path = self.folder / FOLDER / moment.file("groups")
        found = _stat(path)
        if found is None:  # a run that goes on does its last steps again
            raise UserError(f"{path}: is no longer there; try again")
        return _groups(self.folder / FOLDER, moment, found.st_mtime_ns)

    def rollouts(self, moment: Moment) -> pa.Table:
        """record.schema.ROLLOUTS of a moment. Raises UserError where a file is damaged."""
        return read_rollouts(self.folder / FOLDER, moment)


@functools.lru_cache(maxsize=4096)  # a running one is read again and again, and what it has recorded stays as it is
def _groups(folder: Path, moment: Moment, changed: int) -> pa.Table:
    return read_groups(folder, moment)


def read_run(folder: Path) -> RunFiles:
    """Read a run. Raises UserError for a folder that holds none, and for a file of it that is damaged."""
    folder = folder.absolute()
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run; give the run.dir of a training run")
    if not (folder / METRICS_FILE).is_file():
        raise UserError(f"{folder}: holds no {METRICS_FILE}; give the run.dir of a training run")
    record = run_record.read(folder)
    return RunFiles(
        folder=folder,
        rows=list(read_metrics(folder / METRICS_FILE)),
        summary=_summary(folder / SUMMARY),
        config=record.get("config") or _of_checkpoint(folder),
        starts=record.get("starts", []),
        moments=moments(folder / FOLDER) if any((folder / FOLDER).glob("*.groups.parquet")) else [],
    )


def stamp(folders: Iterable[Path]) -> str:
    """Another text whenever a file that a report is made of has changed."""
    names = (METRICS_FILE, SUMMARY, run_record.FILE, FOLDER)
    paths = [folder / name for folder in folders for name in names]
    found = [(s.st_mtime_ns, s.st_size) if (s := _stat(path)) else None for path in paths]
    return repr(found)


def _stat(path: Path) -> Any:
    try:
        return path.stat()
    except OSError:
        return None


def _summary(path: Path) -> Row:
    return read_object(path, "delete it to report without it") if path.exists() else {}


def _of_checkpoint(folder: Path) -> Mapping[str, Any]:
    """What the newest checkpoint says of the configuration: of runs that are older than run.json."""
    for path in sorted(folder.glob("checkpoints/step_*/run.json"), reverse=True):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))["fingerprint"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(found, dict):
            return found
    return {}
