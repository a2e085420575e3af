"""A checkpoint that is written while the run goes on: at most one, by a thread, of a copy of the state.

The thread has a process group of its own, so that what ranks tell one another of their files never meets a collective
of the run. `latest` moves there and then, when every rank's files are on the disk and verified; the run hears of it
between steps. A thread, not a process: a fork would have locks of gloo's threads, and could be killed alone.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from megatron_brorl.checkpoints.host_copies import HostCopies
from megatron_brorl.checkpoints.training import Save
from megatron_brorl.parallel import collectives

_NICE = 10  # more than the run has; under load a tenth of the processor time of its threads


class Background:
    """What is on its way to the disk, if anything; the same on every rank."""

    def __init__(self) -> None:
        self._save: Save | None = None
        self._thread = threading.Thread()
        self._group: dist.ProcessGroup | None = None
        self._error: BaseException | None = None  # of the thread, and not of the disk
        self.copies = HostCopies()  # of the state that is under way
        self.write_s = 0.0  # seconds that the last one took

    @property
    def under_way(self) -> bool:
        """Whether one has begun whose end `settle` has not told yet."""
        return self._save is not None

    def start(self, save: Save, timeout: timedelta) -> None:
        """Write it from here on; a collective. None may be under way. timeout: that ranks may be apart when done."""
        assert self._save is None
        if self._group is None and dist.get_world_size() > 1:
            self._group = dist.new_group(timeout=timeout, backend="gloo")
        self._save = save
        self._thread = threading.Thread(target=self._write, args=(save,), name="checkpoint", daemon=True)
        self._thread.start()

    def busy(self) -> bool:
        """Whether any rank still writes; a collective where one is under way. Raises what its thread raised here."""
        if self._save is None:
            return False
        writes = self._thread.is_alive()
        if self._error:
            raise self._error
        return bool(collectives.all_reduce_max({"writes": float(writes)})["writes"])

    def settle(self) -> Save | None:
        """Wait for its end; a collective where one is under way, which is returned. Raises NotWritten as Save.agree."""
        if self._save is None:
            return None
        self._thread.join()
        save, self._save = self._save, None
        if self._error:
            raise self._error
        save.agree()
        return save

    def finish(self, tell: Callable[[str], None]) -> None:
        """Wait where the run ends by an error, and other ranks may be gone: what failed is told, and nothing raised."""
        if self._save is None:
            return
        self._thread.join()
        if told := self._save.refusals.told() or " ".join(str(self._error or "").split()):
            tell(f"warning: {self._save.target}: cannot be written: {told}")
        self._save = None

    def seconds_to_come(self) -> float:
        """What saving may still take, as far as the last one tells: of the end of the run, and of what is under way."""
        return self.write_s * (1 + self.under_way)

    def _write(self, save: Save) -> None:
        begun = time.monotonic()
        try:
            _give_way()
            save.write(self._group)
        except BaseException as e:  # raised where the run can hear it
            self._error = e
        self.write_s = time.monotonic() - begun


def _give_way() -> None:
    """Let this thread, and those that it starts, have what the run leaves of the processors: hashing takes seconds."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICE))
