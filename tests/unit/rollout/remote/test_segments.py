"""Shared memory of processes that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from megatron_brorl.rollout.remote.segments import segments, unlink_segments

MAKES = """
from multiprocessing import get_context
from multiprocessing.shared_memory import SharedMemory
memory, lock = SharedMemory(create=True, size=64), get_context("spawn").Lock()
print(memory.name, "sem." + lock._semlock.name.removeprefix("/"), flush=True)
input()
"""


def test_what_a_killed_group_shared_goes_and_nobody_elses():
    own = SharedMemory(create=True, size=64)
    try:
        with subprocess.Popen(
            [sys.executable, "-c", MAKES],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as child:
            theirs = {Path("/dev/shm", name) for name in child.stdout.readline().split()}
            assert len(theirs) == 2
            assert all(path.exists() for path in theirs)
            assert segments(child.pid) == theirs
            unlink_segments(child.pid)
            os.killpg(child.pid, signal.SIGKILL)
        assert not any(path.exists() for path in theirs)
        assert segments(child.pid) == set()
        assert Path("/dev/shm", own.name).exists()
    finally:
        own.close()
        own.unlink()
