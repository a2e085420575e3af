"""How a test makes a double die: BRORL_DOUBLE_DIE=POINT:NUMBER:FILE ends the process by SIGKILL the NUMBERth time that
it comes to POINT, once; it makes FILE. BRORL_DOUBLE_HANG, likewise: the caller's thread stands still there for ever."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

_seen: dict[str, int] = {}


def come_to(point: str) -> None:
    """Die or stand still here if this is the time and the place."""
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
