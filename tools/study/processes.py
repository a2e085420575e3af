"""Processes of a study: each is a fork of one that has imported everything, and one job runs at a time on a machine."""

from __future__ import annotations

import fcntl
import importlib
import multiprocessing
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

from megatron_brorl.errors import UserError
from megatron_brorl.ranks import LISTENER

_IMPORTED = "study.imported"
_LAST_WORDS_S = 10.0  # for the other ranks, once one has failed


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Hold the directory and the machine. Raises UserError where another study has either."""
    directory.mkdir(parents=True, exist_ok=True)
    machine = Path(tempfile.gettempdir()) / f"brorl_study.{os.getuid()}.lock"
    with open(directory / ".lock", "w") as own, open(machine, "w") as shared:
        for file, what in ((own, f"{directory}: another study writes there"), (shared, "another study runs here")):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{what}; wait for its end: two at a time would measure one another") from None
        yield


class Ranks:
    """Starts jobs as `processes` ranks each."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        # Read once, where OpenMP is loaded: by the process that is forked.
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // processes))
        # Found by the process that is forked, which begins without our sys.path.
        known = filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
        os.environ["PYTHONPATH"] = os.pathsep.join(known)
        from megatron_brorl.parallel import device

        # CUDA does not survive a fork: where there is a GPU every process begins by itself.
        self._context: Any = multiprocessing.get_context("spawn" if device.on_gpu() else "forkserver")
        if not device.on_gpu():
            self._context.set_forkserver_preload([_IMPORTED])
            forkserver.ensure_running()

    def run(self, job: str, arguments: tuple[Any, ...], log: Path, ranks: int = 0) -> None:
        """job(*arguments) in every rank, to its end. Raises UserError naming the log where one fails.

        job: a function of this package, "module.name": its module is imported in the ranks alone.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        size = ranks or self._processes
        # Rank 0 gets the socket where the ranks meet: no one else can take the port in between.
        with socket.create_server(("127.0.0.1", 0)) as listener:
            told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
            told |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
            started = [
                self._context.Process(
                    target=_rank,
                    args=(job, arguments, told | {"RANK": str(i), "LOCAL_RANK": str(i)}, log, None if i else listener),
                )
                for i in range(size)
            ]
            for process in started:
                process.start()
        failed = _wait(started)
        if failed:
            raise UserError(f"{_last_line(log)} ({log}); mend that and start the same command again to go on")


def fresh(folder: Path) -> None:
    """Remove what a killed job has left."""
    shutil.rmtree(folder, ignore_errors=True)


def commit() -> str:
    """Of the sources, "-dirty" where they were changed since; "" outside of a repository."""
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _wait(started: list[Any]) -> bool:
    """Whether any has failed; the others are ended then."""
    left, failed = list(started), False
    try:
        while left:
            ended = connection.wait([p.sentinel for p in left], _LAST_WORDS_S if failed else None)
            if failed and not ended:
                break
            for process in [p for p in left if p.sentinel in ended]:
                process.join()
                left.remove(process)
                failed = failed or bool(process.exitcode)
    finally:
        for process in left:
            process.kill()
            process.join()
    return failed


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.is_file() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "a run ended without a word")


def _rank(
    job: str,
    arguments: tuple[Any, ...],
    told: dict[str, str],
    log: Path,
    listener: socket.socket | None,
) -> None:
    """In the new process, which ends with the one that asked for it."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()

    # What a launcher would tell it, and where it speaks.
    os.environ.update(told)
    if listener is not None:
        os.environ[LISTENER] = str(listener.detach())
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    module, _, name = job.partition(".")
    try:
        getattr(importlib.import_module(f"study.{module}"), name)(*arguments)
    except UserError as e:
        print(e, flush=True)
        os._exit(2)
