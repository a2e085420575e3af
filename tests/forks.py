"""Processes that are forked from one that has imported torch and Megatron: the seconds of CPU that this takes are paid
once, not by every rank of every run.

Tests of how a run begins and ends as processes (launchers, signals, kills) start the command line itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing.forkserver as server
import os
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection, get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from megatron_brorl.parallel import cpu_bridge
from megatron_brorl.rollout.remote import process as remote_process
from megatron_brorl.signals import LISTENER

IMPORTED = [
    *("megatron_brorl.cli.train", "megatron_brorl.cli.sft", "megatron_brorl.cli.report"),
    *("megatron_brorl.ops.fused.backend", "reasoning_gym", "transformers"),
    *(f"transformers.models.{family}.modeling_{family}" for family in ("llama", "qwen2", "qwen3", "gemma3")),
    "megatron.core.dist_checkpointing.strategies.torch",
]
# CUDA does not survive a fork: where there is a GPU every process begins by itself.
CONTEXT: Any = get_context("spawn" if cpu_bridge.on_gpu() else "forkserver")
if not cpu_bridge.on_gpu():
    CONTEXT.set_forkserver_preload(IMPORTED)
LAST_WORDS_S = 20.0  # for the other ranks, once one has failed


def command_line(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    cwd: Path | None = None,
    figures: bool = True,
    main: Callable[[list[str]], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """`brorl` with these arguments; with --processes N as so many ranks that meet as those of torchrun do.

    figures: whether they are drawn, or their files left empty. main: a test's own way into the command line, in every
    rank.
    """
    words, size = list(arguments), 0
    main = main or (_main if figures else _main_without_figures)
    if "--processes" in words:
        at = words.index("--processes")
        size = int(words[at + 1])
        del words[at : at + 2]
    if not size:
        return _complete([(main, words, environment, cwd)])

    # Rank 0 gets the socket where the ranks meet: no one else can take the port in between.
    with meeting_point() as listener:
        told = meeting(listener, size)
        return _complete(
            [(main, words, {**environment, **told[rank]}, cwd, None if rank else listener) for rank in range(size)]
        )


def script(path: Path, *arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A Python file run as a script."""
    return _complete([(_script, [str(path), *map(str, arguments)], dict(os.environ), cwd)])


def engines() -> SimpleNamespace:
    """What rollout.remote.process needs of `subprocess`: of our own interpreter its processes are forks."""

    def popen(command: Sequence[str], **options: Any) -> Any:
        return Module(command, **options) if command[0] == sys.executable else subprocess.Popen(command, **options)

    return SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)


class Module:
    """As subprocess.Popen for `python -m MODULE ARGUMENTS`, in a fork; its input ends with us."""

    def __init__(self, command: Sequence[str], *, stdout: Any, env: Mapping[str, str], **_: Any) -> None:
        theirs, self.stdin = CONTEXT.Pipe(duplex=False)
        given = (theirs, stdout.name, dict(env), command[2], list(command[3:]))
        self._process = CONTEXT.Process(target=_module, args=given, daemon=True)
        self._process.start()
        theirs.close()
        self.pid: int = self._process.pid
        with contextlib.suppress(ProcessLookupError):
            while self._process.is_alive() and os.getsid(self.pid) != self.pid:  # whoever ends it ends its session
                time.sleep(0.001)

    def poll(self) -> int | None:
        """Its exit code, a signal's as a negative number, or None while it runs."""
        code: int | None = self._process.exitcode
        return code

    def wait(self) -> int:
        """The same, once it has ended."""
        self._process.join()
        code: int = self._process.exitcode
        return code


def meeting_point() -> socket.socket:
    """Listens on a free port."""
    return socket.create_server(("127.0.0.1", 0))


def meeting(listener: socket.socket, size: int) -> list[dict[str, str]]:
    """The environment of each of `size` ranks that meet there; `take` is for rank 0."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
    sizes = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    return [{**place, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def take(listener: socket.socket | None) -> None:
    """In the process of rank 0: its store will listen on this socket, as on one of our launcher."""
    if listener is not None:
        os.environ[LISTENER] = str(listener.detach())


def _complete(jobs: Sequence[tuple[Any, ...]]) -> subprocess.CompletedProcess[str]:
    """Processes of _forked to their end, with what they wrote."""
    with TemporaryDirectory() as folder:
        if not cpu_bridge.on_gpu():
            server.ensure_running()
        place = server._forkserver._forkserver_address
        processes = [CONTEXT.Process(target=_forked, args=(place, folder, *job)) for job in jobs]
        for process in processes:
            process.start()
        code = _wait(processes)
        said = [(Path(folder) / name).read_text() for name in ("stdout", "stderr")]
    return subprocess.CompletedProcess(jobs[0][1], code, *said)


def _wait(processes: Sequence[Any], seconds: float = 300.0) -> int:
    """The exit code of the first that failed, or 0; a signal's number is negative."""
    code, deadline = 0, time.monotonic() + seconds
    left = list(processes)
    try:
        while left:
            ended = connection.wait([p.sentinel for p in left], max(0.0, deadline - time.monotonic()))
            if not ended and code:
                break
            if not ended:
                raise TimeoutError(f"{len(left)} of {len(processes)} processes go on")
            for process in [p for p in left if p.sentinel in ended]:
                process.join()
                left.remove(process)
                if process.exitcode and not code:
                    code, deadline = process.exitcode, min(deadline, time.monotonic() + LAST_WORDS_S)
    finally:
        for process in left:
            process.kill()
            process.join()
    return code


def _forked(
    place: str | None,
    folder: str,
    what: Callable[[list[str]], None],
    arguments: list[str],
    environment: Mapping[str, str],
    cwd: Path | None = None,
    listener: socket.socket | None = None,
) -> None:
    """In the new process: its environment, its output to files, and then what it is for."""
    if cwd:
        os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    take(listener)
    if place:
        _have_forks(place)
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    what(arguments)


def _have_forks(place: str) -> None:
    """In a fork: engines that it starts are forks of the same process, which is not its own child."""
    server._forkserver._forkserver_address = place
    server._forkserver.ensure_running = lambda: None
    remote_process.subprocess = engines()


def _main(arguments: list[str]) -> None:
    from megatron_brorl.cli.main import main

    main(arguments)


def _main_without_figures(arguments: list[str]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from megatron_brorl.report import plots

    FigureCanvasAgg.print_figure = lambda _, file, **__: Path(file).touch()
    plots.curves_figure = plots.theory_figure = lambda *_: Figure()
    _main(arguments)


def _module(ends: Any, log: str, environment: Mapping[str, str], name: str, arguments: list[str]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    with open(log, "ab") as output:
        for file, number in ((ends.fileno(), 0), (output.fileno(), 1), (output.fileno(), 2)):
            os.dup2(file, number)
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _script(arguments: list[str]) -> None:
    # As Python does where it runs a file, whose neighbours it may import.
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    runpy.run_path(arguments[0], run_name="__main__")
