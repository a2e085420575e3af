"""The record of a run: metrics.jsonl, one line per step, and the same figures for boards such as TensorBoard.

A line is {"step": 3, "reward": 0.5, ..., "time": {"generate": 1.9, ...}}. Everything outside "time" is a function of
the configuration and the seed as long as no rollout is late: two runs with the same seed write the same bytes there.
Wall-clock values are in "time" only, so that a comparison drops that one key, and with them what depends on time:
"handed_on" and "tokens_again", what engines handed on to others and computed again. Floats are written by repr and come
back bit for bit. JSON has no NaN: a value that is not finite becomes null, and its key is listed under "nonfinite".
glossary/ says what each figure means.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_brorl.boards import Board, tag, warn
from megatron_brorl.errors import UserError

METRICS_FILE = "metrics.jsonl"
_RESERVED = {"step", "nonfinite", "time"}


class Lines:
    """A file of JSON lines, each with a "step", that is made durable with every call. Exactly one rank may hold one.

    `resume_step` is the first step that this process will write: lines of that step and later ones are dropped, so a
    replayed step never appears twice. None starts a new file: an older one is moved aside (metrics.1.jsonl, ...).

    A write that fails, for example on a full disk, never ends the run: it warns once, and every line that did not make
    it is kept and tried again with the next call.
    """

    def __init__(self, path: Path, resume_step: int | None) -> None:
        self._path = path
        self._pending = b""  # lines that are not yet safely in the file
        self._warned = False

        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if resume_step is None:
                _move_aside(path)  # nothing is overwritten
            else:
                _drop_from(path, resume_step)  # steps that will be written again
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115  held until close()
            self._size = os.fstat(self._file.fileno()).st_size  # up to here the file holds whole lines
        except OSError as e:
            raise UserError(f"{path}: cannot be written: {e.strerror}; make run.dir a writable folder") from None

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write one line per row, each a JSON object with a "step"."""
        self._pending += b"".join(json.dumps(row, allow_nan=False).encode() + b"\n" for row in rows)
        self._flush()

    def close(self) -> None:
        """Write what is left and close the file."""
        if not self._file.closed:
            self._flush()
            self._file.close()

    def _flush(self) -> None:
        try:
            os.ftruncate(self._file.fileno(), self._size)  # take back what a failed attempt left
            rest = memoryview(self._pending)
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
            os.fsync(self._file.fileno())
        except OSError as e:
            if not self._warned:
                self._warned = True
                _warn(str(self._path), e, "training goes on; missing lines are written when the disk allows it")
        else:
            self._size += len(self._pending)
            self._pending = b""


class MetricsWriter:
    """One line per step, as of Lines, and the same for boards."""

    def __init__(self, run_dir: Path, boards: Sequence[Board] = (), resume_step: int | None = None) -> None:
        self._lines = Lines(Path(run_dir) / METRICS_FILE, resume_step)
        self._boards = list(boards)

    def write(self, step: int, values: dict[str, float | int], seconds: dict[str, float]) -> None:
        """Record one step: `values` are deterministic given the seed, `seconds` are wall-clock times by phase, and
        what is told of them."""
        clash = _RESERVED & values.keys()
        if clash:
            raise ValueError(f"reserved metric names: {', '.join(sorted(clash))}")

        # The file first: it is the record, and what the disk refuses is kept there and tried again.
        row: dict[str, Any] = {"step": step, **_finite(values)}
        nonfinite = [key for key, value in values.items() if not math.isfinite(value)]  # JSON has no NaN
        if nonfinite:
            row["nonfinite"] = nonfinite
        row["time"] = _finite(seconds)  # apart from the rest, for it differs from run to run
        self._lines.append([row])

        # The boards second, in groups of figures. One is given up at its first error, the run never.
        tagged = {tag(name): value for name, value in values.items()}
        tagged |= {tag(name, timed=True): value for name, value in seconds.items()}
        known = {name: value for name, value in tagged.items() if math.isfinite(value)}
        self._tell(lambda board: board.log(step, known))

    def close(self) -> None:
        """Write what is left and close the files."""
        self._lines.close()
        self._tell(lambda board: board.close())
        self._boards = []

    def _tell(self, what: Callable[[Board], None]) -> None:
        for board in list(self._boards):
            try:
                what(board)
            except Exception as e:  # whatever a board's package raises: of a network, an account, a disk
                self._boards.remove(board)
                warn(board.name, e)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _warn(what: str, error: OSError, consequence: str) -> None:
    with contextlib.suppress(OSError):  # stderr may be a file on the same full disk
        print(f"warning: {what}: {error.strerror or error}; {consequence}", file=sys.stderr, flush=True)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, in order. A last line torn by a crash is skipped.

    Raises UserError where the file cannot be read or another line is no step.
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
    """Every line with what it says, except a torn last one. Raises UserError on any other malformed line."""
    lines = path.read_bytes().split(b"\n")
    if not lines[-1]:
        lines.pop()
    rows = []
    for number, line in enumerate(lines, start=1):
        row: Any = None
        with contextlib.suppress(ValueError, RecursionError):  # of the JSON or of its UTF-8
            row = json.loads(line.decode())
        if isinstance(row, dict) and type(row.get("step")) is int:
            rows.append((line, row))
        elif number < len(lines):
            raise UserError(f'{path}:{number}: not a JSON object with an integer "step"; delete this line')
    return rows


def _move_aside(path: Path) -> None:
    """Rename an older record to the first free of metrics.1.jsonl, metrics.2.jsonl, ..."""
    if path.exists():
        number = 1
        while (aside := path.with_suffix(f".{number}.jsonl")).exists():
            number += 1
        path.rename(aside)


def _drop_from(path: Path, step: int) -> None:
    """Keep the lines before `step`, byte for byte; the file is the old one or the new one at any instant."""
    if not path.exists():
        return
    kept = [line + b"\n" for line, row in _parse(path) if row["step"] < step]

    # Written beside the old file, and put in its place at once.
    aside = path.with_suffix(".jsonl.tmp")
    with open(aside, "wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)

    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # makes the rename itself durable
    finally:
        os.close(folder)
