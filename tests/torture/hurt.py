"""A process of a run in which something happens at the n-th time that it does a certain thing.

What it does to files under the run's folder is counted (opening, every write, renaming, removing, syncing), and what it
does beside: phases of a step, collectives, rollouts that end. A write that is hurt is half done.
"""

from __future__ import annotations

import builtins
import collections
import errno
import io
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet
import torch.distributed as dist

from megatron_brorl import timeline
from megatron_brorl.ranks import LAUNCHER
from megatron_brorl.rewards.scoring import Scorer

# Of the environment: {"rank", "where": "place: what", "at": which time, "do", "lasting", "under": folder, "flag": file,
# "log": file}
KEY = "TORTURE"
PHASE = "phase"  # the place of what is not done to files
RANK_KILLS = ("SIGKILL a rank", "SIGTERM a rank")
LAUNCHER_KILLS = ("SIGKILL the launcher", "SIGTERM the launcher")
FREEZES = ("freeze a rank for a while", "freeze the launcher for a while", "freeze a rank")
SCORER_KILLS = ("kill a scoring process", "freeze a scoring process for a while", "freeze a scoring process")
ENGINE_KILLS = ("kill an engine", "freeze an engine for a while")
_MAKES = ("open to write", "mkdir", "rename", "replace", "write_table")
FAULTS = {  # what a disk refuses then
    "ENOSPC": (*_MAKES, "write", "fsync"),
    "EACCES": (*_MAKES, "open", "remove", "unlink", "rmdir", "rmtree"),
    "EIO": (*_MAKES, "write", "fsync", "open", "unlink", "ftruncate"),
}
_WHILE_S = 0.4  # that something is frozen for a while
_CALLS = ((os, "rename"), (os, "replace"), (os, "mkdir"), (os, "remove"), (os, "unlink"), (os, "fsync"),
          (os, "ftruncate"), (os, "rmdir"), (shutil, "rmtree"))  # fmt: skip


class Hurt:
    """Counts what this process does, and acts at one of these events."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.told, self.pid, self.lock = told, os.getpid(), threading.Lock()
        self.seen: collections.Counter[str] = collections.Counter()
        self.engines: list[int] = []  # their process numbers, where they are forks

        # Files, by Python's own calls and by pyarrow's writer, which makes none.
        for owner, name in _CALLS:
            setattr(owner, name, self._watched(getattr(owner, name)))
        builtins.open = io.open = self._opened(io.open)
        pyarrow.parquet.write_table = self._table_writer(pyarrow.parquet.write_table)

        # Phases: whoever has imported the function has a name of its own for it.
        span, watched = timeline.span, self._phase(timeline.span, lambda name, *_: str(name))
        for module in [m for m in sys.modules.values() if getattr(m, "span", None) is span]:
            module.span = watched  # type: ignore[attr-defined]
        for name in ("all_reduce", "all_gather", "barrier", "all_to_all_single"):
            setattr(dist, name, self._phase(getattr(dist, name), lambda *_: "collective"))
        Scorer.finished = self._phase(Scorer.finished, lambda *_: "rollout")  # type: ignore[method-assign]
        self._note_engines()

    def write_log(self) -> None:
        """How often each thing happened, where that was asked for."""
        if "log" in self.told:
            Path(self.told["log"]).write_text(json.dumps(self.seen))

    def event(self, name: str, place: str, file: object = None, half: Callable[[], object] = lambda: None) -> None:
        """Something is about to be done. half: does half of it."""
        where = f"{place}: {name}"
        with self.lock:
            self.seen[where] += 1
            due = where == self.told.get("where") and self.seen[where] == self.told["at"]
        what = self.told["do"]
        if due:
            print(f"torture: {what}, {where} for the {self.seen[where]}. time", file=sys.stderr, flush=True)
            if self.told.get("lasting"):
                os.close(os.open(self.told["flag"], os.O_CREAT | os.O_WRONLY))
            if what in FAULTS or what == RANK_KILLS[0]:  # after anything else it is done all the same
                half()
            self._act(what, file)
        elif self.told.get("lasting") and name in FAULTS.get(what, ()) and os.path.exists(self.told["flag"]):
            self._act(what, file)

    def place(self, file: Any, folder: int | None = None) -> str:
        """Where a file of the run lies, in a word or two; "" for any other."""
        if isinstance(file, int):
            try:
                file = os.readlink(f"/proc/self/fd/{file}")
            except OSError:
                return ""
        elif folder is not None:
            file = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fspath(file))
        if not isinstance(file, (str, os.PathLike)) or os.getpid() != self.pid:
            return ""
        path, under = os.fspath(file), self.told["under"]
        if not isinstance(path, str) or not (path == under or path.startswith(f"{under}/")):
            return ""
        parts = [part.removeprefix(".") for part in Path(path).relative_to(under).parts]
        if parts[:1] == ["checkpoints"] and parts[-1].startswith("latest"):
            return "latest"
        return parts[0].removesuffix(".writing").removesuffix(".tmp").removesuffix(".old") if parts else "run.dir"

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            place = self.place(args[0], kwargs.get("dir_fd")) if args else ""
            if place:
                self.event(call.__name__, place, args[0])
            return call(*args, **kwargs)

        return watched

    def _opened(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
            place = self.place(file)
            if not place or isinstance(file, int):
                return call(file, mode, buffering, *args, **kwargs)
            writes = bool(set(mode) & set("wax+"))
            self.event("open to write" if writes else "open", place, file)
            if not writes:
                return call(file, mode, buffering, *args, **kwargs)

            # As io.open makes it, on a file whose writes are counted.
            raw = _Raw(self, place, file, mode.replace("b", "").replace("t", ""))
            if not buffering:
                return raw
            buffer = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffer if "b" in mode else _text(buffer, mode, *args, **kwargs)

        return opened

    def _table_writer(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def written(table: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
            def half() -> None:
                call(table, file, *args, **kwargs)
                os.truncate(file, os.path.getsize(file) // 2)

            if place := self.place(file):
                self.event("write_table", place, file, half)
            return call(table, file, *args, **kwargs)

        return written

    def _phase(self, call: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
        def phase(*args: Any, **kwargs: Any) -> Any:
            self.event(name(*args), PHASE)
            return call(*args, **kwargs)

        return phase

    def _note_engines(self) -> None:
        import forks

        begin = forks.Module.__init__

        def begun(module: Any, *args: Any, **kwargs: Any) -> None:
            begin(module, *args, **kwargs)
            self.engines.append(module.pid)

        forks.Module.__init__ = begun  # type: ignore[method-assign]

    def _act(self, what: str, file: object) -> None:
        if what in FAULTS:
            number = getattr(errno, what)
            named = () if file is None or isinstance(file, int) else (str(file),)  # of an open file no error tells
            raise OSError(number, os.strerror(number), *named)

        # Who it is: where there is one by now.
        pid = self.pid
        if "launcher" in what:
            pid = int(os.environ[LAUNCHER])
        elif "scoring" in what:
            pid = next((p.pid for p in psutil.Process().children() if "rewards.worker" in " ".join(p.cmdline())), 0)
        elif "engine" in what:
            pid = self.engines[-1] if self.engines else 0
        if not pid:
            print("torture: nobody there", file=sys.stderr, flush=True)
            return

        # A child of nobody here wakes it, for a run counts the children that it has.
        if "for a while" in what:
            wake = f"(sleep {_WHILE_S}; kill -CONT {pid}) >/dev/null 2>&1 &"
            os.waitpid(os.posix_spawn("/bin/sh", ["sh", "-c", wake], {}), 0)
        number = signal.SIGSTOP if "freeze" in what else signal.SIGTERM if "TERM" in what else signal.SIGKILL
        os.kill(pid, number)


class _Raw(io.FileIO):
    """A file that is written to."""

    def __init__(self, hurt: Hurt, place: str, file: Any, mode: str) -> None:
        super().__init__(file, mode)
        self._hurt, self._place = hurt, place

    def write(self, data: Any) -> int:
        half = memoryview(data).cast("B")
        self._hurt.event("write", self._place, None, lambda: super(_Raw, self).write(half[: len(half) // 2]))
        return super().write(data)


def _text(buffer: Any, mode: str, encoding: Any = None, errors: Any = None, newline: Any = None) -> io.TextIOWrapper:
    made = io.TextIOWrapper(buffer, encoding, errors, newline)
    made.mode = mode  # type: ignore[misc]
    return made
