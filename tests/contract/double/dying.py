"""Fault injection. BRORL_DOUBLE_DIE=POINT:NUMBER:FILE kills the process when it reaches POINT for the NUMBERth time,
unless FILE exists, which it creates. BRORL_DOUBLE_HANG blocks the calling thread instead."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

_seen: dict[str, int] = {}


def come_to(point: str) -> None:
    """Kill the process or block here if a fault is injected at this point."""
    if _now(point, "BRORL_DOUBLE_DIE"):
        os.kill(os.getpid(), signal.SIGKILL)
    if _now(point, "BRORL_DOUBLE_HANG"):
        time.sleep(1e6)


def _now(point: str, variable: str) -> bool:
    chosen, _, rest = os.environ.get(variable, "").partition(":")
    if chosen != point:
        return False
    number, _, flag = rest.partition(":")
    _seen[point] = _seen.get(point, 0) + 1
    if _seen[point] < int(number) or Path(flag).exists():
        return False
    Path(flag).touch()
    return True
