"""Run a program on its tests in a sandbox, with one outcome per test.

A sandbox is a process that runs one program, exchanges lines of JSON, and is killed with everything inside. Only the
inputs of tests enter it. The caller compares the text or the values of builtin types that come out.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, Literal

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.sandbox import isolation, seccomp
from megatron_brorl.rewards.sandbox.inside import codec
from megatron_brorl.rewards.sandbox.isolation import Limits
from megatron_brorl.rewards.verifier import printable

KEY = "reward.unsandboxed"
WARNING = f"{KEY} = true: programs that the model writes run as this user, with limits but without isolation"
_START_S = 20.0  # time limit for the start of a sandbox
_CHUNK = 1 << 16  # bytes to read or write at once
Status = Literal["ok", "error", "timeout", "output", "crash", "syntax", "ended", "form"]
_STATUSES = frozenset(("ok", "error", "timeout", "output", "crash", "syntax"))  # statuses that the sandbox reports
_REASONS = {"timeout": "out of time", "output": "too much output"}
_REASON_CHARS = 80


@dataclass(frozen=True)
class Outcome:
    """The outcome of one test.

    error: the program raised, or exited with a code other than 0. output: it wrote too much. crash: a signal ended it.
    syntax: it does not compile. ended: its process was gone, or the total time was up. form: its answer is malformed.
    """

    status: Status
    reason: str = ""
    stdout: str = ""
    value: Any = None  # the return value of a function


class SandboxError(RuntimeError):
    """The machine could not start a sandbox; the program is not to blame."""


class Ended(Exception):
    """The program exceeded its time limit, ended, or wrote a malformed message."""


class SandboxProcess:
    """A sandbox in which inside.guard runs `job`."""

    def __init__(self, job: dict[str, Any], limits: Limits, isolated: bool) -> None:
        self._limits = limits
        self._isolated = isolated
        self._outgoing = self._incoming = b""
        self._pidfd: int | None = None
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
        if self._pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            os.close(self._pidfd)
            self._pidfd = None
        elif not self._isolated and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        else:
            self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._process.stderr):
            if file:
                file.close()
        if self._folder:
            self._folder.cleanup()

    def _start(self) -> None:
        options: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        options["bufsize"] = 0
        if self._folder:
            options |= {"cwd": self._folder.name, "env": {}, "start_new_session": True}
            self._process = subprocess.Popen(isolation.bare_command(), **options)
        else:
            info_read, info_write = os.pipe()
            filter_read, filter_write = os.pipe()
            os.write(filter_write, seccomp.program())
            os.close(filter_write)
            try:
                arguments, fds = isolation.command(self._limits, filter_read, info_write)
                self._process = subprocess.Popen(arguments, pass_fds=fds, **options)
            finally:
                # The child has copies of both files. The originals would keep its pipes open.
                os.close(info_write)
                os.close(filter_read)
            # `close` kills process 1 of the namespace, because the kernel then kills all other processes in it.
            self._pidfd = _pidfd(info_read)
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


@dataclass(frozen=True)
class Sandbox:
    """Runs programs, isolated unless reward.unsandboxed is set (see require)."""

    isolated: bool
    limits: Limits

    def run(self, program: str, stdin: str) -> Outcome:
        """Run the program as a script with this standard input."""
        return self.scripts(program, [stdin])[0]

    def scripts(self, program: str, stdins: Sequence[str], prelude: str = "") -> list[Outcome]:
        """Run the program as a script, once per standard input. The prelude runs before it, in its namespace."""
        job = {"mode": "scripts", "program": program, "prelude": prelude}
        return _completed(self._answered(job, [{"stdin": stdin} for stdin in stdins]), len(stdins))

    def calls(self, program: str, function: str, calls: list[Mapping[str, Any]], prelude: str = "") -> list[Outcome]:
        """Call the program's function, once per {"args", "kwargs"}, which inside.codec has encoded."""
        job = {"mode": "calls", "program": program, "function": function, "prelude": prelude}
        requests = [{"args": call["args"], "kwargs": call.get("kwargs", {})} for call in calls]
        return _completed(self._answered(job, requests), len(calls))

    def asserts(self, program: str, function: str, setup: str, tests: list[str], prelude: str = "") -> list[Outcome]:
        """Run test code that calls the program's function. The program runs in another sandbox than the tests."""
        return _completed(self._judged(program, function, setup, tests, prelude), len(tests))

    def _answered(self, job: dict[str, Any], requests: Sequence[dict[str, Any]]) -> Iterator[Outcome]:
        with closing(SandboxProcess(job, self.limits, self.isolated)) as process:
            for request in requests:
                process.send(request)
            for _ in requests:
                yield _outcome(process.receive())

    def _judged(self, program: str, function: str, setup: str, tests: Sequence[str], prelude: str) -> Iterator[Outcome]:
        job = {"mode": "calls", "program": program, "function": function, "prelude": prelude}
        judge_job = {"mode": "asserts", "program": setup, "function": function}
        with (
            closing(SandboxProcess(job, self.limits, self.isolated)) as candidate,
            closing(SandboxProcess(judge_job, self.limits, self.isolated)) as judge,
        ):
            for test in tests:
                judge.send({"test": test})

                # The value of each call is all that the tests receive from the program.
                while "call" in (message := judge.receive()):
                    candidate.send(message["call"])
                    judge.send(_answer(_outcome(candidate.receive())))
                passed = message.get("passed") is True
                yield Outcome("ok" if passed else "error", printable(message.get("why", ""), _REASON_CHARS))


@functools.lru_cache(maxsize=1)
def problem() -> str | None:
    """Return why programs cannot be isolated here, and the remedy, in one line; None if they can."""
    if sys.platform != "linux" or platform.machine() not in seccomp.MACHINES:
        return f"no sandbox for {sys.platform} on {platform.machine()}; use Linux on x86_64 or aarch64"
    if not shutil.which("bwrap"):
        return "bubblewrap is missing; install it (apt-get install bubblewrap)"

    # A container may forbid namespaces, which only a trial run shows.
    try:
        outcome = Sandbox(isolated=True, limits=Limits(seconds=20.0, test_seconds=20.0)).run("print(6 * 7)", "")
    except (SandboxError, OSError) as e:
        reason = " ".join(str(e).split())
    else:
        if outcome.stdout == "42\n":
            return None
        reason = outcome.reason or "a program gave the wrong output"
    return f"{reason}; permit user namespaces (docker run --security-opt seccomp=unconfined --cap-add SYS_ADMIN)"


def refuse(where: str, reason: str) -> UserError:
    """Return the error for a machine without isolation."""
    return UserError(f"{where}: {reason}; or set {KEY} = true to run what the model writes without isolation")


def require(where: str) -> bool:
    """Return whether to isolate programs. Raises UserError if they must be isolated and cannot be."""
    if os.environ.get(isolation.UNSANDBOXED) == "1":
        return False
    if reason := problem():
        raise refuse(where, reason)
    return True


def _completed(outcomes: Iterator[Outcome], count: int) -> list[Outcome]:
    """Return `count` outcomes. Those that are missing when the program ends have the status "ended"."""
    received: list[Outcome] = []
    try:
        received.extend(outcomes)  # keeps those before the error
    except Ended as e:
        received += [Outcome("ended", str(e))] * (count - len(received))
    return received


def _outcome(message: Mapping[str, Any]) -> Outcome:
    """Convert a message from inside to an outcome. The program may have forged any part of it."""
    status, why, stdout, result = (message.get(key, "") for key in ("status", "why", "stdout", "result"))
    if status not in _STATUSES or not all(isinstance(part, str) for part in (why, stdout, result)):
        return Outcome("form", "a message that is not an outcome")
    reason = printable(why, _REASON_CHARS) or _REASONS.get(status, "")
    if status != "ok":
        return Outcome(status, reason, stdout)

    # The result of a script is null.
    try:
        return Outcome("ok", stdout=stdout, value=codec.decode(codec.parse(result)))
    except codec.Unencodable as e:
        return Outcome("form", str(e)[:_REASON_CHARS], stdout=stdout)


def _answer(outcome: Outcome) -> dict[str, Any]:
    """Return the message that answers a call of the program's function by a test (runner.asserts)."""
    if outcome.status == "ok":
        return {"value": codec.encode(outcome.value)}
    return {"raised": outcome.reason if outcome.status == "error" else outcome.status}


def _pidfd(info: int) -> int | None:
    """Return a handle on the process that bubblewrap names in `info`; None if it ended before that."""
    with open(info, "rb") as file:
        text = file.read()
    try:
        return os.pidfd_open(json.loads(text)["child-pid"])
    except (ValueError, KeyError, ProcessLookupError):
        return None
