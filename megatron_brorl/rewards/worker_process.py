"""A worker process that keeps objects between calls and can be killed at any time.

The process is started by exec, never by a plain fork. That is safe in a parent with torch threads and open sockets,
and unlike multiprocessing's "spawn" it does not import the main module again.

Calls travel as pickles. Each result comes back as one line of JSON of bounded length, because the parent must not
unpickle anything from a process that has handled hostile text.
"""

from __future__ import annotations

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
from typing import Any

from megatron_brorl.rewards.worker import READY

START_S = 120.0  # for the imports that objects need
_MAX_LINE = 1 << 16
_EXIT_S = 10.0


class WorkerLostError(Exception):
    """A worker ended, broke the protocol, or was too slow. It must be closed.

    started: whether the objects of its calls existed. If so, the first call without a result caused the failure.
    """

    def __init__(self, reason: str, started: bool, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.started = started
        self.timed_out = timed_out


class WorkerProcess:
    """One worker process; a context manager that kills it. Only `stop` may be called from another thread."""

    def __init__(self, make: str, memory_mb: int = 4096) -> None:
        """make: "module:function" from the name of an object to the object, which the worker keeps."""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (closed in close)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_brorl.rewards.worker", make, str(memory_mb), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=_environment(),
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

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(self, calls: Sequence[tuple[str, tuple[Any, ...]]], seconds: float) -> Iterator[Any]:
        """Call objects, each given by its name, with arguments; yield the results in order. Raises WorkerLostError.

        seconds: the limit of each call. Objects that do not exist yet are made first, within START_S.
        """
        if self._buffer or _ready(self._results, select.POLLIN, 0):
            raise WorkerLostError("ended, or wrote an unexpected result", started=False)
        self._send(pickle.dumps(calls, protocol=pickle.HIGHEST_PROTOCOL))
        if self._receive(START_S, started=False) != READY:
            raise WorkerLostError("wrote an unexpected result", started=False)
        for _ in calls:
            yield self._receive(seconds, started=True)

    def stop(self) -> None:
        """Kill the process from another thread, in which `run` then raises WorkerLostError."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process and everything that it has started."""
        if self._process.returncode is None:  # Only then is the process id certainly still its own.
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                self._process.kill()
            self._process.wait()
        for file in (self._calls, self._results, self._stderr):
            file.close()

    def _send(self, message: bytes) -> None:
        unsent = memoryview(message)
        end = time.monotonic() + START_S
        while unsent:
            if not _ready(self._calls, select.POLLOUT, end - time.monotonic()):
                raise WorkerLostError(f"no answer in {START_S:g} s", started=False, timed_out=True)
            try:
                unsent = unsent[os.write(self._calls.fileno(), unsent) :]
            except BrokenPipeError:
                raise WorkerLostError(self._failure(), started=False) from None

    def _receive(self, seconds: float, started: bool) -> Any:
        end = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            if len(self._buffer) > _MAX_LINE:
                raise WorkerLostError("wrote a result that is too long", started)
            if not _ready(self._results, select.POLLIN, end - time.monotonic()):
                raise WorkerLostError(f"no answer in {seconds:g} s", started, timed_out=True)
            data = os.read(self._results.fileno(), _MAX_LINE)
            if not data:
                raise WorkerLostError(self._failure(), started)
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise WorkerLostError("wrote a result that is not JSON", started) from None

    def _failure(self) -> str:
        """Return the last line on stderr of a process that ended by itself, or how it ended."""
        try:
            code = self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        if code < 0:
            return f"killed by {signal.Signals(-code).name}, perhaps for lack of memory"
        self._stderr.seek(0)
        lines = self._stderr.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {code}"


def call_in_worker(function: str, *arguments: Any) -> Any:
    """Return what "module:function" returns in a worker process of its own. Raises WorkerLostError."""
    with WorkerProcess("megatron_brorl.rewards.worker:load") as worker:
        return next(worker.run([(function, arguments)], START_S))


def _ready(file: Any, event: int, seconds: float) -> bool:
    pipe = select.poll()
    pipe.register(file, event)
    return bool(pipe.poll(1000 * max(0.0, seconds)))


def _environment() -> dict[str, str]:
    """Return the environment of a worker process.

    It gives the worker the import path of this process, and gives all workers the same hash seed.
    """
    seed = os.environ.get("PYTHONHASHSEED", "")
    return {
        **os.environ,
        **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
        "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path),
        "PYTHONSAFEPATH": "1",
        "PYTHONHASHSEED": seed if seed.isdigit() else "0",
        "CUDA_VISIBLE_DEVICES": "",
    }
