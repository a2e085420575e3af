"""metrics.jsonl, one line per step, and the same metrics for trackers such as TensorBoard.

A line is {"step": 3, "reward": 0.5, ..., "time": {"generate": 1.9, ...}}. Wall-clock values, and counts that depend on
them, are in "time" only. Two runs with the same seed write the same bytes elsewhere, as long as no rollout is late.
JSON has no NaN: a value that is not finite becomes null, and its key is listed under "nonfinite".
tracking/metric_docs.json describes each metric.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_brorl.errors import UserError, shown, warn
from megatron_brorl.files import rename_aside
from megatron_brorl.tracking.trackers import Tracker, tag

METRICS_FILE = "metrics.jsonl"
_RESERVED = {"step", "nonfinite", "time"}


class MetricsWriter:
    """Writes one line per step to metrics.jsonl, and the same metrics to trackers. Only one rank may open it.

    resume_step: the first step that this process will write. Lines of that step and later ones are dropped, so that a
    repeated step appears once. None starts a new file and renames an older one to metrics.1.jsonl, metrics.2.jsonl, ...

    Every line is on the disk when write() returns. A failing disk, for example a full one, does not end the run: the
    first failure is printed, and the lines are written with the next step.
    """

    def __init__(self, run_dir: Path, trackers: Sequence[Tracker] = (), resume_step: int | None = None) -> None:
        self._path = run_dir / METRICS_FILE
        self._trackers = list(trackers)
        self._pending = b""  # lines that are not in the file yet
        self._warned = False
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            if resume_step is not None:
                _drop_from(self._path, resume_step)
            elif self._path.exists():
                rename_aside(self._path)
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115
            self._size = os.fstat(self._file.fileno()).st_size  # bytes of whole lines
        except OSError as e:
            raise UserError(f"{self._path}: cannot be written: {e.strerror}; make run.dir a writable folder") from None

    def write(self, step: int, values: dict[str, float | int], seconds: dict[str, float]) -> None:
        """Record one step.

        values: metrics that the seed determines. seconds: wall-clock times, and metrics that depend on them.
        """
        clash = _RESERVED & values.keys()
        if clash:
            raise ValueError(f"reserved metric names: {', '.join(sorted(clash))}")

        row: dict[str, Any] = {"step": step, **_finite(values)}
        nonfinite = [key for key, value in values.items() if not math.isfinite(value)]
        if nonfinite:
            row["nonfinite"] = nonfinite
        row["time"] = _finite(seconds)
        self._pending += json.dumps(row, allow_nan=False).encode() + b"\n"
        self._flush()

        tagged = {tag(name): value for name, value in values.items()}
        tagged |= {tag(name, "time"): value for name, value in seconds.items()}
        finite = {name: value for name, value in tagged.items() if math.isfinite(value)}
        self._for_each(lambda tracker: tracker.log(step + 1, finite))

    def close(self) -> None:
        """Write pending lines and close the file and the trackers."""
        if not self._file.closed:
            self._flush()
            self._file.close()
        self._for_each(lambda tracker: tracker.close())
        self._trackers = []

    def _flush(self) -> None:
        try:
            os.ftruncate(self._file.fileno(), self._size)  # remove the rest of a failed attempt
            unwritten = memoryview(self._pending)
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) or 0 :]
            os.fsync(self._file.fileno())
        except OSError as e:
            if not self._warned:
                consequence = "training continues; missing lines are written when the disk allows it"
                warn(f"{self._path}: {e.strerror or e}; {consequence}")
            self._warned = True
        else:
            self._size += len(self._pending)
            self._pending = b""

    def _for_each(self, call: Callable[[Tracker], None]) -> None:
        """Call every tracker, and drop those that fail: a display must not end the run."""
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except Exception as e:
                self._trackers.remove(tracker)
                warn(f"run.log: {tracker.name}: {shown(e)}; it gets no more metrics")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl, in order, without a last line that a crash cut off.

    Raises UserError if the file cannot be read or another line is malformed.
    """
    try:
        return [row for _, row in _parse(Path(path))]
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give the folder of a run that has done a step") from None
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror}") from None


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value if math.isfinite(value) else None for key, value in values.items()}


def _parse(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Return every line and its object, without a last line that was cut off. Raises UserError for a malformed line."""
    lines = path.read_bytes().split(b"\n")
    if not lines[-1]:
        lines.pop()
    rows = []
    for number, line in enumerate(lines, start=1):
        row: Any = None
        with contextlib.suppress(ValueError, RecursionError):  # malformed JSON or UTF-8
            row = json.loads(line.decode())
        if isinstance(row, dict) and type(row.get("step")) is int:
            rows.append((line, row))
        elif number < len(lines):
            raise UserError(f'{path}:{number}: not a JSON object with an integer "step"; delete this line')
    return rows


def _drop_from(path: Path, step: int) -> None:
    """Keep the lines before `step`, byte for byte. The file is replaced atomically."""
    if not path.exists():
        return
    kept = [line + b"\n" for line, row in _parse(path) if row["step"] < step]
    aside = path.with_suffix(".jsonl.tmp")
    with open(aside, "wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
