"""Fault injection. BRORL_DOUBLE_DIE=POINT:NUMBER:FILE creates FILE and kills the process when it reaches POINT for the
NUMBERth time or later. If FILE exists, nothing happens."""

from __future__ import annotations

import os
import signal
from pathlib import Path

_reached: dict[str, int] = {}


def fault_point(point: str) -> None:
    """Kill the process if a fault is injected at this point."""
    chosen, _, rest = os.environ.get("BRORL_DOUBLE_DIE", "").partition(":")
    if chosen != point:
        return
    number, _, flag = rest.partition(":")
    _reached[point] = _reached.get(point, 0) + 1
    if _reached[point] >= int(number) and not Path(flag).exists():
        Path(flag).touch()
        os.kill(os.getpid(), signal.SIGKILL)
