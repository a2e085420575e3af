"""What a test chooses about the double, and how it makes it die."""

from __future__ import annotations

import os
import signal
from pathlib import Path

API = os.environ.get("BRORL_DOUBLE_API", "1.3")
KV_TOKENS = int(os.environ.get("BRORL_DOUBLE_KV_TOKENS", "200000"))
SEEDS = os.environ.get("BRORL_DOUBLE_SEEDS", "1") == "1"
assert API in ("1.2", "1.3"), API

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
