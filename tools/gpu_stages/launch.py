"""A stage in a process of its own, with a limit of time: a hang or a crash is a row. The standard library alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
WHOLE = "the stage as a whole"


def launch(
    command: Sequence[str], rows: Path, log: Path, limit: float, environment: Mapping[str, str]
) -> tuple[list[Row], float]:
    """What the command wrote to `rows`, with a row more where it did not end well; and its seconds.

    log: where its output goes. limit: seconds, after which it and all that it has started are killed.
    """
    begun, late = time.monotonic(), False
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            # Its children too, whoever has ended first: the next stage needs the device's memory.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    # What had been found before is kept.
    found = read_rows(rows)
    if late:
        found.append(_failed(f"ran past {limit:g} s and was ended; its output: {log}"))
    elif process.returncode:
        code = process.returncode
        how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
        found.append(_failed(f"{how}: {_last_line(log)}"))
    return found, time.monotonic() - begun


def read_rows(path: Path) -> list[Row]:
    """The rows of a file of JSON lines, of which the last may be cut off."""
    found: list[Row] = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


def _failed(why: str) -> Row:
    return {"what": WHOLE, "result": f"failed: {why}"}


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"
