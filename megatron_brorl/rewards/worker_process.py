"""A worker process that keeps callable objects, such as loaded verifiers, and calls them on request.

The process is started by exec, because a plain fork is unsafe in a parent with torch threads and open sockets, and
multiprocessing's "spawn" would import the main module again. Calls are sent as pickles. Each result comes back as one
line of JSON of bounded length, because the parent must not unpickle data of a process that has handled hostile text.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any

from megatron_brorl.rewards.worker_main import READY

START_S = 120.0  # time limit for creating the objects, which includes their imports
_MAX_LINE = 1 << 20  # bytes of one result
EXIT_S = 10.0  # time limit for ending after the pipe was closed


class WorkerLostError(Exception):
    """A worker ended, broke the protocol, or was too slow. It must be closed.

    during_call: whether the worker was running the first call that has no result yet. Otherwise it failed earlier, for
    example while it created the objects.
    """

    def __init__(self, reason: str, during_call: bool, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.during_call = during_call
        self.timed_out = timed_out


class WorkerProcess:
    """One worker process. Only `stop` may be called from another thread."""

    def __init__(self, factory: str, memory_mb: int = 4096) -> None:
        """factory: import path "module:function" of a function that returns the object with a given name."""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (closed in close)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_brorl.rewards.worker_main", factory, str(memory_mb), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment(),
            start_new_session=True,  # The terminal's Ctrl-C is meant for the trainer.
            bufsize=0,
        )
        assert self._process.stdin
        assert self._process.stdout
        self.pid = self._process.pid
        self._calls = self._process.stdin
        self._results = self._process.stdout
        os.set_blocking(self._calls.fileno(), False)
        self._buffer = b""

    def run(self, calls: Sequence[tuple[str, tuple[Any, ...]]], seconds: float) -> Iterator[Any]:
        """Run calls (name of an object, arguments) and yield their results in order. Raises WorkerLostError.

        seconds: time limit of each call. Before the calls, the worker creates missing objects, within START_S.
        """
        if self._buffer or _ready(self._results, select.POLLIN, seconds=0):
            raise WorkerLostError("ended, or wrote an unexpected result", during_call=False)
        self._send(pickle.dumps(calls, protocol=pickle.HIGHEST_PROTOCOL))
        if self._receive(START_S, during_call=False) != READY:
            raise WorkerLostError("wrote an unexpected result", during_call=False)
        for _ in calls:
            yield self._receive(seconds, during_call=True)

    def stop(self) -> None:
        """Kill the process; any thread may call this. `run` then raises WorkerLostError in its own thread."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process and all processes that it has started."""
        if self._process.returncode is None:  # Otherwise the system may have given the process id to another process.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        for file in (self._calls, self._results, self._stderr):
            file.close()

    def _send(self, message: bytes) -> None:
        unsent = memoryview(message)
        end = time.monotonic() + START_S
        while unsent:
            if not _ready(self._calls, select.POLLOUT, end - time.monotonic()):
                raise WorkerLostError(f"no answer in {START_S:g} s", during_call=False, timed_out=True)
            try:
                unsent = unsent[os.write(self._calls.fileno(), unsent) :]
            except BrokenPipeError:
                raise WorkerLostError(self._failure(), during_call=False) from None

    def _receive(self, seconds: float, during_call: bool) -> Any:
        end = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            if len(self._buffer) > _MAX_LINE:
                raise WorkerLostError("wrote a result that is too long", during_call)
            if not _ready(self._results, select.POLLIN, end - time.monotonic()):
                raise WorkerLostError(f"no answer in {seconds:g} s", during_call, timed_out=True)
            data = os.read(self._results.fileno(), 1 << 16)
            if not data:
                raise WorkerLostError(self._failure(), during_call)
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise WorkerLostError("wrote a result that is not JSON", during_call) from None

    def _failure(self) -> str:
        """Return the last line on stderr of a process that ended by itself, or how it ended."""
        try:
            code = self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        return end_reason(code, self._stderr)


def call_in_worker(function: str, *arguments: Any) -> Any:
    """Call `function` ("module:function") in a new worker process and return the result. Raises WorkerLostError."""
    with contextlib.closing(WorkerProcess("megatron_brorl.rewards.worker_main:load")) as worker:
        return next(worker.run([(function, arguments)], START_S))


def _ready(file: Any, event: int, seconds: float) -> bool:
    pipe = select.poll()
    pipe.register(file, event)
    return bool(pipe.poll(1000 * max(0.0, seconds)))


def end_reason(code: int, stderr: IO[bytes]) -> str:
    """Return the last line that a process has written to stderr, or how it ended; code: its return code."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}, perhaps for lack of memory"
    stderr.seek(0)
    lines = stderr.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {code}"


def environment() -> dict[str, str]:
    """Return environment variables that give each worker this process's import path and the same hash seed."""
    seed = os.environ.get("PYTHONHASHSEED", "")
    return {
        **os.environ,
        **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
        "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path),
        "PYTHONSAFEPATH": "1",
        "PYTHONHASHSEED": seed if seed.isdigit() else "0",
        "CUDA_VISIBLE_DEVICES": "",
        "MALLOC_ARENA_MAX": "2",  # An arena per thread would reserve 64 MB each of the limited address space.
    }
