"""Shared memory beside an engine's folder: what its processes make there by names of their own, such as queues between
an engine and its workers, stays when they are killed, for nobody else knows of it.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

# What Python's multiprocessing makes: segments, and semaphores of spawned processes.
_NAMES = ("psm_*", "sem.mp-*")
# By number: who has made a semaphore has it mapped by another name, which is gone.
_NUMBER = re.compile(r"^\S+ \S+ \S+ \S+ (\d+) +/dev/shm/", re.MULTILINE)


def segments(group: int) -> set[Path]:
    """Those that living processes of this process group have mapped."""
    numbers: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            if os.getpgid(int(process.name)) == group:
                numbers.update(_NUMBER.findall((process / "maps").read_text()))

    found = set()
    for path in (path for name in _NAMES for path in Path("/dev/shm").glob(name)):
        with contextlib.suppress(OSError):  # another process removed it
            if str(path.stat().st_ino) in numbers:
                found.add(path)
    return found


def unlink_segments(group: int) -> None:
    """Remove their names. To be called before the group is killed, for the dead have nothing mapped; who has one mapped
    keeps it, and its memory is free when the last of them has ended."""
    for segment in segments(group):
        with contextlib.suppress(OSError):
            segment.unlink()
