"""The pool's handle on one worker process.

Started by exec and never by a plain fork, so it is safe in a process with torch threads and open sockets, and unlike
multiprocessing's "spawn" it does not import the main module again. Its own session keeps the terminal's Ctrl-C away.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile

from megatron_brorl.rewards.protocol import LENGTH, Item, Malformed, Record, unpack

_EXIT_S = 10.0
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class WorkerProcess:
    """One worker, from start to end."""

    def __init__(self, resolve: str, memory_mb: int) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (closed in kill)
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "megatron_brorl.rewards.worker"),
                *(resolve, str(memory_mb), str(os.getpid())),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment(),
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._verdicts = self._process.stdin, self._process.stdout
        os.set_blocking(self._requests.fileno(), False)
        self._unsent = memoryview(b"")
        self._partial = b""

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    @property
    def verdicts(self) -> int:
        """File descriptor, readable when there are verdicts or when the process is gone."""
        return self._verdicts.fileno()

    @property
    def requests(self) -> int:
        """File descriptor, writable when flush can go on."""
        return self._requests.fileno()

    def send(self, items: list[Item]) -> None:
        """Have a chunk ready for flush; the one before must be out."""
        body = pickle.dumps(items, protocol=pickle.HIGHEST_PROTOCOL)
        self._unsent = memoryview(LENGTH.pack(len(body)) + body)

    def flush(self) -> bool:
        """Write what the pipe takes; whether that was all. A worker that is gone shows at the next receive."""
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self.requests, self._unsent) :]
        except BlockingIOError:
            return False
        except BrokenPipeError:
            self._unsent = memoryview(b"")
        return True

    def receive(self) -> list[Record] | None:
        """The records that have arrived; None when the process is gone, or had to go for what it wrote."""
        data = os.read(self._verdicts.fileno(), 1 << 16)
        if not data:
            return None
        try:
            records, self._partial = unpack(self._partial + data)
        except Malformed:
            self.kill_at_once()  # something in it writes where only the worker may
            return None
        return records

    def kill_at_once(self) -> None:
        """End the process alone; kill has to follow."""
        self._process.kill()

    def failure(self) -> str | None:
        """Why a worker that is gone ended by itself: the last line it wrote. None if a signal ended it."""
        try:
            if self._process.wait(_EXIT_S) < 0:
                return None
        except subprocess.TimeoutExpired:
            return None
        self._stderr.seek(0)
        lines = self._stderr.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.returncode}"

    def kill(self) -> None:
        """End it and all that its verifiers have started."""
        if self._process.returncode is None:  # not waited for yet, so the number is still its own
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                self._process.kill()
            self._process.wait()
        for file in (self._requests, self._verdicts, self._stderr):
            file.close()


def environment() -> dict[str, str]:
    """Of a scoring process: what this one imports it can, and it is the same in all of them."""
    seed = os.environ.get("PYTHONHASHSEED", "")
    return {
        **os.environ,
        **dict.fromkeys(_ONE_THREAD, "1"),
        "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path),
        "PYTHONSAFEPATH": "1",
        "PYTHONHASHSEED": seed if seed.isdigit() else "0",  # the same reward in every worker
        "CUDA_VISIBLE_DEVICES": "",
    }
