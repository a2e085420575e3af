"""The process of one sandbox. It runs one program, exchanges lines of JSON, and is killed with everything inside."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from typing import Any

from megatron_brorl.rewards.sandbox import isolation, seccomp
from megatron_brorl.rewards.sandbox.inside import codec
from megatron_brorl.rewards.sandbox.isolation import Limits

_START_S = 20.0
_CHUNK = 1 << 16


class SandboxError(RuntimeError):
    """The machine could not start a sandbox; the program is not to blame."""


class Ended(Exception):
    """The program exceeded its time limit, ended, or wrote a malformed message."""


class SandboxProcess:
    """A sandbox in which inside.guard runs `job`; a context manager."""

    def __init__(self, job: dict[str, Any], limits: Limits, isolated: bool) -> None:
        self._limits = limits
        self._isolated = isolated
        self._outgoing = self._incoming = b""
        self._folder = None if isolated else tempfile.TemporaryDirectory(prefix="brorl-")
        self._start()
        self._deadline = time.monotonic() + _START_S
        self.send({**job, **self._limits_message()})
        try:
            if self.receive() != {"up": True}:
                raise Ended("it sent an unexpected message")
        except Ended as e:
            raise SandboxError(f"the sandbox did not start: {self._failure() or e}") from None
        self._deadline = time.monotonic() + limits.seconds

    def __enter__(self) -> SandboxProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def send(self, message: dict[str, Any]) -> None:
        """Queue one message, which is sent while `receive` waits."""
        self._outgoing += json.dumps(message).encode() + b"\n"

    def receive(self) -> dict[str, Any]:
        """Return the next message from inside, of builtin types. Raises Ended."""
        while b"\n" not in self._incoming:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise Ended("out of time")

            # Reading and writing alternate, because two full pipes would wait for each other.
            readable, writable, _ = select.select([self._source], [self._sink] if self._outgoing else [], [], left)
            if writable:
                self._write()
            if readable:
                data = os.read(self._source, _CHUNK)
                self._incoming += data
                if not data:
                    raise Ended("the program ended its process")
                if len(self._incoming) > 8 * self._limits.output_bytes:
                    raise Ended("too much output")
        line, _, self._incoming = self._incoming.partition(b"\n")
        try:
            message = codec.parse(line)
        except codec.Unencodable as e:
            raise Ended("a message that is not JSON") from e
        if not isinstance(message, dict):
            raise Ended("a message that is not an object")
        return message

    def close(self) -> None:
        """Kill every process inside and wait until they are gone."""
        assert self._process.stdin
        assert self._process.stdout
        assert self._process.stderr
        if not self._isolated and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        # The end of its input ends process 1 of a namespace, and the kernel then kills all other processes in it.
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._process.stderr.close()
        if self._folder:
            self._folder.cleanup()

    def _start(self) -> None:
        options: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        options["bufsize"] = 0
        if self._folder:
            options |= {"cwd": self._folder.name, "env": {}, "start_new_session": True}
            self._process = subprocess.Popen(isolation.bare_command(), **options)
        else:
            filter_read, filter_write = os.pipe()
            os.write(filter_write, seccomp.program())
            os.close(filter_write)
            try:
                arguments, fds = isolation.command(self._limits, filter_read)
                self._process = subprocess.Popen(arguments, pass_fds=fds, **options)
            finally:
                os.close(filter_read)
        assert self._process.stdin
        assert self._process.stdout
        self._sink = self._process.stdin.fileno()
        self._source = self._process.stdout.fileno()
        os.set_blocking(self._sink, False)

    def _limits_message(self) -> dict[str, Any]:
        limits = self._limits
        return {
            "user": isolation.USER if self._isolated and os.geteuid() == 0 else None,
            "test_seconds": limits.test_seconds,
            "output_bytes": limits.output_bytes,
            "limits": {
                "RLIMIT_AS": limits.memory_mb << 20,
                "RLIMIT_CPU": int(limits.seconds) + 1,
                "RLIMIT_FSIZE": limits.file_mb << 20,
                "RLIMIT_NOFILE": limits.files,
                "RLIMIT_CORE": 0,
                **({"RLIMIT_NPROC": limits.processes} if self._isolated else {}),
            },
        }

    def _write(self) -> None:
        try:
            self._outgoing = self._outgoing[os.write(self._sink, self._outgoing[:_CHUNK]) :]
        except BrokenPipeError:
            self._outgoing = b""  # `receive` then raises Ended.

    def _failure(self) -> str:
        """Return the last line on stderr."""
        self._process.kill()
        self._process.wait()
        assert self._process.stderr
        os.set_blocking(self._process.stderr.fileno(), False)
        lines = (self._process.stderr.read() or b"").decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else ""
