"""Kill one rank of a run, or let the disk refuse, at one of its file operations.

Operations on files under run.dir are counted by place (the file or folder in run.dir) and kind: open, each write,
rename, remove, sync. A write with a fault writes half of its data.
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

import forks
import pyarrow.parquet

# Environment variable with JSON: {"folder", "rank", "log"} counts operations, and {"folder", "rank", "operation",
# "number", "fault", "lasting"} injects a fault into the number-th call of the operation "place: kind".
KEY = "TORTURE"
KILL = "SIGKILL"
_CREATE = ("open to write", "mkdir", "rename", "replace", "write_table")
DISK = {  # operations that can fail with each error
    "ENOSPC": (*_CREATE, "write", "fsync"),
    "EACCES": (*_CREATE, "open", "remove", "unlink", "rmdir", "rmtree"),
    "EIO": (*_CREATE, "write", "fsync", "open", "unlink", "ftruncate"),
}
_CALLS = [(os, name) for name in ("rename", "replace", "mkdir", "remove", "unlink", "fsync", "ftruncate", "rmdir")]


def main(arguments: list[str]) -> None:
    """Run the command line in a rank, with the fault that the environment variable describes."""
    settings = json.loads(os.environ[KEY])
    faults = Faults(settings) if settings and int(os.environ["RANK"]) == settings["rank"] else None
    try:
        forks.main_without_plots(arguments)
    finally:
        if faults and "log" in settings:
            Path(settings["log"]).write_text(json.dumps(faults.counts))


class Faults:
    """Wraps the functions that change files, for the rest of this process."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.injected = False
        self.counts: collections.Counter[str] = collections.Counter()
        for owner, name in (*_CALLS, (shutil, "rmtree")):
            setattr(owner, name, self._wrapped(getattr(owner, name)))
        builtins.open = io.open = self._wrapped_open(io.open)
        pyarrow.parquet.write_table = self._wrapped_table_writer(pyarrow.parquet.write_table)

    def operation(self, kind: str, place: str, file: object = None, half: Callable[[], object] = lambda: None) -> None:
        """Count an operation before it happens, and inject the fault if it is due. half: does half of the operation."""
        fault = self.settings.get("fault")
        name = f"{place}: {kind}"
        with self.lock:
            self.counts[name] += 1
            due = name == self.settings.get("operation") and self.counts[name] == self.settings["number"]
            repeated = self.injected and self.settings.get("lasting") and kind in DISK.get(str(fault), ())
            self.injected = self.injected or due
        if not due and not repeated:
            return
        if due:
            print(f"torture: {fault}, {name}, time {self.counts[name]}", file=sys.stderr, flush=True)
            half()
        if fault == KILL:
            os.kill(self.pid, signal.SIGKILL)
        file_name = () if file is None or isinstance(file, int) else (str(file),)  # Errors of open files have no name.
        code = getattr(errno, str(fault))
        raise OSError(code, os.strerror(code), *file_name)

    def _place(self, file: Any, folder: int | None = None) -> str:
        """Return the part of run.dir that a file belongs to, or "" for any other file."""
        try:
            if isinstance(file, int):
                file = os.readlink(f"/proc/self/fd/{file}")
            elif folder is not None:
                file = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fspath(file))
        except OSError:
            return ""
        run = self.settings["folder"]
        if not isinstance(file, (str, os.PathLike)) or not f"{os.fspath(file)}/".startswith(f"{run}/"):
            return ""
        if os.getpid() != self.pid:
            return ""
        parts = [part.removeprefix(".") for part in Path(file).relative_to(run).parts]
        if parts[:1] == ["checkpoints"] and parts[-1].startswith("latest"):
            return "latest"
        return parts[0].removesuffix(".writing").removesuffix(".tmp") if parts else "run.dir"

    def _wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if args and (place := self._place(args[0], kwargs.get("dir_fd"))):
                self.operation(call.__name__, place, args[0])
            return call(*args, **kwargs)

        return wrapped

    def _wrapped_open(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
            place = "" if isinstance(file, int) else self._place(file)
            writes = bool(set(mode) & set("wax+"))
            if place:
                self.operation("open to write" if writes else "open", place, file)
            if not place or not writes:
                return call(file, mode, buffering, *args, **kwargs)

            # Build the layers of io.open on a raw file whose writes are counted.
            raw = _CountedFile(self, place, file, mode.replace("b", "").replace("t", ""))
            if not buffering:
                return raw
            buffer = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffer if "b" in mode else io.TextIOWrapper(buffer, *args, **kwargs)

        return wrapped

    def _wrapped_table_writer(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(table: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
            def half() -> None:
                call(table, file, *args, **kwargs)
                os.truncate(file, os.path.getsize(file) // 2)

            if place := self._place(file):
                self.operation("write_table", place, file, half)
            return call(table, file, *args, **kwargs)

        return wrapped


class _CountedFile(io.FileIO):
    def __init__(self, faults: Faults, place: str, file: Any, mode: str) -> None:
        super().__init__(file, mode)
        self._faults = faults
        self._place_in_run = place

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        half = view[: len(view) // 2]
        self._faults.operation("write", self._place_in_run, half=lambda: super(_CountedFile, self).write(half))
        return super().write(data)
