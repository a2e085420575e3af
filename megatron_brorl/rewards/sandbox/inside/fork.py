"""Run one test of a program in a fork, under the supervision of the parent."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

_CHUNK = 1 << 16


class Fork:
    """Runs a function once in a child process with `stdin`, and returns its output and result as a message."""

    def __init__(self, job: dict[str, Any], stdin: bytes = b"") -> None:
        self._stdin = memoryview(stdin)
        self._seconds = job["test_seconds"]
        self._max_bytes = job["output_bytes"]
        self._has_namespace = job["has_namespace"]
        self._texts: dict[int, bytearray] = {}
        self._open: set[int] = set()
        self._stopped = ""

    def run(self, body: Callable[[], bytes]) -> dict[str, Any]:
        """Return {"status": "ok" or the kind of failure, "why", "stdout", "result": the bytes of `body`, as text}.

        If `body` raises SystemExit, the child ends as CPython does at the end of a script. The status is also "ok" if
        the process exits with 0 before `body` returns; the result is "" then.
        """
        stdin_read, stdin_write = os.pipe()
        stdout_read, stdout_write = os.pipe()
        result_read, result_write = os.pipe()
        child = os.fork()
        if child == 0:
            _child(stdin_read, stdout_write, result_write, body)
        for end in (stdin_read, stdout_write, result_write):
            os.close(end)
        self._open = {stdin_write, stdout_read, result_read}

        # Processes that the test started end with it.
        try:
            self._watch(child, stdin_write, stdout_read, result_read)
        finally:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            if self._has_namespace:
                _kill_all()
            for end in self._open:
                os.close(end)
        return self._message(status, bytes(self._texts[stdout_read]), bytes(self._texts[result_read]))

    def _watch(self, child: int, stdin: int, stdout: int, result: int) -> None:
        """Wait until the child ends, its time is up, or it writes too much."""
        exited = os.pidfd_open(child)
        poll = select.poll()
        self._texts = {stdout: bytearray(), result: bytearray()}
        for fd in (stdout, result, exited):
            poll.register(fd, select.POLLIN)
        os.set_blocking(stdin, False)
        poll.register(stdin, select.POLLOUT)
        deadline = time.monotonic() + self._seconds

        # The exit counts only after all output has been read from the pipes.
        while not self._stopped:
            left = deadline - time.monotonic()
            if left <= 0:
                self._stopped = "timeout"
                break
            ready = {fd for fd, _ in poll.poll(1000 * left)}
            if ready == {exited}:
                break
            for fd in ready - {exited}:
                if not (self._feed(stdin) if fd == stdin else self._drain(fd)):
                    poll.unregister(fd)
                    if fd == stdin:
                        self._open.remove(stdin)
                        os.close(stdin)  # ends the input of the child
        os.close(exited)

    def _feed(self, stdin: int) -> bool:
        try:
            self._stdin = self._stdin[os.write(stdin, self._stdin[:_CHUNK]) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False
        return bool(self._stdin)

    def _drain(self, fd: int) -> bool:
        data = os.read(fd, _CHUNK)
        self._texts[fd] += data
        if len(self._texts[fd]) > self._max_bytes:
            self._stopped = "output"
        return bool(data)

    def _message(self, status: int, stdout: bytes, result: bytes) -> dict[str, Any]:
        text = stdout.decode("utf-8", "replace")
        why = result.decode("utf-8", "replace")
        if self._stopped:
            return {"status": self._stopped, "why": "", "stdout": ""}
        if os.WIFSIGNALED(status):
            return {"status": "crash", "why": signal.Signals(os.WTERMSIG(status)).name, "stdout": text}
        if os.WEXITSTATUS(status):
            return {"status": "error", "why": why or f"exit code {os.WEXITSTATUS(status)}", "stdout": text}
        return {"status": "ok", "why": "", "stdout": text, "result": why}


def _child(stdin: int, stdout: int, result: int, body: Callable[[], bytes]) -> NoReturn:
    pid = os.getpid()
    # The pipes get the usual numbers, and every other file is closed.
    for end, number in ((os.dup(stdin), 0), (os.dup(stdout), 1), (os.dup(result), 3)):
        os.dup2(end, number)
    os.closerange(4, 256)
    try:
        returned = body()
    except SystemExit:
        raise  # The interpreter runs its own shutdown.
    except BaseException as e:
        _write_result(pid, type(e).__name__.encode("utf-8", "replace")[:100])
        sys.exit(1)
    _write_result(pid, returned)
    os._exit(0)


def _write_result(pid: int, text: bytes) -> None:
    # A process that the program forked may reach this line. Only process `pid` may write the result.
    if os.getpid() == pid:
        os.write(3, text)


def _kill_all() -> None:
    # Kill all processes of the namespace except process 1 and this one. They may exist for a moment longer.
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(-1, signal.SIGKILL)
            time.sleep(1e-4)
