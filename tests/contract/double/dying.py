"""How a test makes a double die: BRORL_DOUBLE_DIE=POINT:NUMBER:FILE ends the process by SIGKILL the NUMBERth time that
it comes to POINT, once; it makes FILE."""

from __future__ import annotations

import os
import signal
from pathlib import Path

_seen: dict[str, int] = {}


def come_to(point: str) -> None:
    """Die here if this is the time and the place."""
    chosen, _, rest = os.environ.get("BRORL_DOUBLE_DIE", "").partition(":")
    if chosen != point:
        return
    number, _, flag = rest.partition(":")
    _seen[point] = _seen.get(point, 0) + 1
    if _seen[point] >= int(number) and not Path(flag).exists():
        Path(flag).touch()
        os.kill(os.getpid(), signal.SIGKILL)
