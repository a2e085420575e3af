"""A run in which something happens at the n-th time that a process touches its run's folder."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

KEY = "TORTURE"  # of the environment: {"at": event number, "rank": ..., "do": ..., "under": folder, "log": file}
KILLS = ("SIGKILL", "SIGTERM", "kill a scoring process", "freeze a scoring process")
FAULTS = ("ENOSPC", "EACCES", "EIO")


def main(arguments: list[str]) -> None:
    """The command line of a rank, hurt as the environment says."""
    from forks import _main_without_figures

    told = json.loads(os.environ[KEY])
    if int(os.environ.get("RANK", "0")) == told["rank"]:
        _Hurt(told)
    _main_without_figures(arguments)


class _Hurt:
    """Counts what this process does to files under a folder, and acts at one of these events."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.told, self.seen, self.pid = told, 0, os.getpid()
        for owner, name in (
            (builtins, "open"), (io, "open"), (os, "rename"), (os, "replace"), (os, "mkdir"), (os, "remove"),
            (os, "unlink"), (os, "fsync"), (os, "ftruncate"), (os, "rmdir"), (shutil, "rmtree"),
        ):  # fmt: skip
            setattr(owner, name, self._watched(getattr(owner, name)))

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if args and os.getpid() == self.pid and self._is_ours(args[0]):
                self._event(call.__name__)
            return call(*args, **kwargs)

        return watched

    def _is_ours(self, place: Any) -> bool:
        if isinstance(place, int):  # a file descriptor
            try:
                place = os.readlink(f"/proc/self/fd/{place}")
            except OSError:
                return False
        return isinstance(place, (str, os.PathLike)) and os.fspath(place).startswith(self.told["under"])

    def _event(self, name: str) -> None:
        self.seen += 1
        if self.told["do"] == "count":
            Path(self.told["log"]).write_text(str(self.seen))
        if self.seen != self.told["at"]:
            return
        print(f"torture: {self.told['do']} at event {self.seen} ({name})", file=sys.stderr, flush=True)
        self._act(self.told["do"])

    def _act(self, what: str) -> None:
        if what in FAULTS:
            number = getattr(errno, what)
            raise OSError(number, os.strerror(number))
        if what in ("SIGKILL", "SIGTERM"):
            os.kill(os.getpid(), getattr(signal, what))
            return

        # A process that scores, where there is one by now.
        import psutil

        children = sorted(psutil.Process().children(recursive=True), key=lambda p: p.pid)
        if children:
            chosen = random.Random(self.told["at"]).choice(children)
            os.kill(chosen.pid, signal.SIGKILL if what.startswith("kill") else signal.SIGSTOP)
