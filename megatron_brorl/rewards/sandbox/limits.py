"""How much a program may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Of one program and all of its tests. Memory in total: at most processes * memory_mb + 2 * scratch_mb."""

    seconds: float  # for all tests together, from when the sandbox stands
    test_seconds: float  # for one test
    memory_mb: int = 512  # address space of a process
    processes: int = 8  # with their threads; three are the sandbox's own
    output_bytes: int = 1 << 20  # of one test
    file_mb: int = 8  # the largest file
    scratch_mb: int = 16  # /tmp, and /dev/shm as much again
    files: int = 64  # open at a time
