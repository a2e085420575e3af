"""Run the command line in processes that are forked from one that has imported torch and Megatron.

The imports take seconds of CPU time, which each rank of each run would otherwise spend. Tests of launchers, signals and
kills start the command line itself (e2e/runs.py: start).
"""

from __future__ import annotations

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
    *("megatron_brorl.cli.train", "megatron_brorl.cli.report"),
    *("megatron_brorl.ops.fused.backend", "pandas", "reasoning_gym", "transformers"),
    *(f"transformers.models.{family}.modeling_{family}" for family in ("llama", "qwen2", "qwen3", "gemma3")),
    "megatron.core.dist_checkpointing.strategies.torch",
]
# CUDA does not survive a fork, so on a GPU each process is spawned.
CONTEXT: Any = get_context("spawn" if cpu_bridge.on_gpu() else "forkserver")
if not cpu_bridge.on_gpu():
    CONTEXT.set_forkserver_preload(IMPORTED)
GRACE_S = 20.0  # time for the other ranks to end after one has failed


def command_line(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    cwd: Path | None = None,
    plots: bool = True,
    main: Callable[[list[str]], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `brorl` with these arguments; --processes N starts N ranks, which connect as those of torchrun do.

    plots: draw plots instead of writing empty files. main: the function that each rank calls with the arguments.
    """
    words = list(arguments)
    size = 0
    main = main or (_main if plots else main_without_plots)
    if "--processes" in words:
        option = words.index("--processes")
        size = int(words[option + 1])
        del words[option : option + 2]
    if not size:
        return _complete([(main, words, environment, cwd)])

    # Rank 0 inherits the listening socket, so that no other process can use the port before it does.
    with listen_on_free_port() as listener:
        jobs = [
            (main, words, {**environment, **variables}, cwd, None if rank else listener)
            for rank, variables in enumerate(rank_environments(listener, size))
        ]
        return _complete(jobs)


def script(path: Path, *arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a Python file as a script."""
    return _complete([(_script, [str(path), *map(str, arguments)], dict(os.environ), cwd)])


def engines() -> SimpleNamespace:
    """Return a stand-in for `subprocess` in rollout.remote.process that forks processes of this interpreter."""

    def popen(command: Sequence[str], **options: Any) -> Any:
        return Module(command, **options) if command[0] == sys.executable else subprocess.Popen(command, **options)

    return SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)


class Module:
    """Like subprocess.Popen for `python -m MODULE ARGUMENTS`, in a fork. Its stdin closes when this process ends."""

    def __init__(self, command: Sequence[str], *, stdout: Any, env: Mapping[str, str], **_: Any) -> None:
        child_end, self.stdin = CONTEXT.Pipe(duplex=False)
        ready, in_session = CONTEXT.Pipe(duplex=False)
        arguments = (child_end, in_session, stdout.name, dict(env), command[2], list(command[3:]))
        self._process = CONTEXT.Process(target=_module, args=arguments, daemon=True)
        self._process.start()
        child_end.close()
        in_session.close()
        self.pid: int = self._process.pid
        # To end an engine, its client kills the session, so the session must exist first.
        ready.poll(None)

    def poll(self) -> int | None:
        """Return the exit code (a signal as a negative number), or None while the process runs."""
        return self._process.exitcode

    def wait(self) -> int:
        """Wait for the end of the process, and return its exit code."""
        self._process.join()
        return self._process.exitcode


def listen_on_free_port() -> socket.socket:
    """Return a socket that listens on a free port of the loopback interface."""
    return socket.create_server(("127.0.0.1", 0))


def rank_environments(listener: socket.socket, size: int) -> list[dict[str, str]]:
    """Return the environment of each of `size` ranks that connect to the listener; rank 0 calls `adopt_listener`."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
    sizes = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    return [{**address, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def adopt_listener(listener: socket.socket | None) -> None:
    """Make the store of this process, rank 0, listen on this socket, as the launcher of `brorl` does."""
    if listener is not None:
        os.environ[LISTENER] = str(listener.detach())


def _complete(jobs: Sequence[tuple[Any, ...]]) -> subprocess.CompletedProcess[str]:
    """Run `_forked` in one process per job (its arguments after `folder`); return the exit code and all output."""
    with TemporaryDirectory() as folder:
        if not cpu_bridge.on_gpu():
            server.ensure_running()
        server_address = server._forkserver._forkserver_address
        processes = [CONTEXT.Process(target=_forked, args=(server_address, folder, *job)) for job in jobs]
        for process in processes:
            process.start()
        code = _wait(processes)
        streams = [(Path(folder) / name).read_text() for name in ("stdout", "stderr")]
    return subprocess.CompletedProcess(jobs[0][1], code, *streams)  # jobs[0][1]: the arguments of the command


def until(happened: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until `happened` returns a true value."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _wait(processes: Sequence[Any], seconds: float = 300.0) -> int:
    """Return the exit code of the first process that fails, or 0; a signal is a negative number."""
    code = 0
    deadline = time.monotonic() + seconds
    running = list(processes)
    try:
        while running:
            ended = connection.wait([p.sentinel for p in running], max(0.0, deadline - time.monotonic()))
            if not ended and code:
                break
            if not ended:
                raise TimeoutError(f"{len(running)} of {len(processes)} processes still run")
            for process in [p for p in running if p.sentinel in ended]:
                process.join()
                running.remove(process)
                if process.exitcode and not code:
                    code = process.exitcode
                    deadline = min(deadline, time.monotonic() + GRACE_S)
    finally:
        for process in running:
            process.kill()
            process.join()
    return code


def _forked(
    server_address: str | None,
    folder: str,
    function: Callable[[list[str]], None],
    arguments: list[str],
    environment: Mapping[str, str],
    cwd: Path | None = None,
    listener: socket.socket | None = None,
) -> None:
    """Set environment and working directory, write the output to files, and call `function`."""
    if cwd:
        os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    adopt_listener(listener)
    if server_address:
        _have_forks(server_address)
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    function(arguments)


def _have_forks(server_address: str) -> None:
    """Let this process fork its engines from the fork server, which is a child of the test process, not of this one."""
    server._forkserver._forkserver_address = server_address
    server._forkserver.ensure_running = lambda: None
    remote_process.subprocess = engines()


def _main(arguments: list[str]) -> None:
    from megatron_brorl.cli.main import main

    main(arguments)


def main_without_plots(arguments: list[str]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from megatron_brorl.report import plots

    FigureCanvasAgg.print_figure = lambda _, file, **__: Path(file).touch()
    plots.curves_figure = lambda *_: Figure()
    _main(arguments)


def _module(
    stdin: Any, in_session: Any, log: str, environment: Mapping[str, str], name: str, arguments: list[str]
) -> None:
    os.setsid()
    in_session.close()
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    with open(log, "ab") as output:
        for file, number in ((stdin.fileno(), 0), (output.fileno(), 1), (output.fileno(), 2)):
            os.dup2(file, number)
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _script(arguments: list[str]) -> None:
    # Python does the same for a script, which may import modules of its folder.
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    runpy.run_path(arguments[0], run_name="__main__")
