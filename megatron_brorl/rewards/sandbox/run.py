"""Run a program on its tests in a sandbox, with one outcome per test.

Only the inputs of tests enter the sandbox. The caller compares the text or the values of builtin types that come out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_brorl.rewards.sandbox.inside import codec
from megatron_brorl.rewards.sandbox.isolation import Limits
from megatron_brorl.rewards.sandbox.process import Ended, SandboxProcess
from megatron_brorl.rewards.verifier import printable

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


@dataclass(frozen=True)
class Sandbox:
    """Runs programs, isolated unless reward.unsandboxed is set (see probe.require)."""

    isolated: bool
    limits: Limits

    def run(self, program: str, stdin: str) -> Outcome:
        """Run the program as a script with this standard input."""
        return self.scripts(program, [stdin])[0]

    def scripts(self, program: str, stdins: Sequence[str], prelude: str = "") -> list[Outcome]:
        """Run the program as a script, once per standard input. The prelude runs before it, in its namespace."""
        job = {"mode": "scripts", "program": program, "prelude": prelude}
        return _completed(self._answered(job, [{"stdin": stdin} for stdin in stdins]), len(stdins))

    def calls(
        self, program: str, function: str, calls: Sequence[Mapping[str, Any]], prelude: str = ""
    ) -> list[Outcome]:
        """Call the program's function, once per {"args", "kwargs"}, which inside.codec has encoded."""
        job = {"mode": "calls", "program": program, "function": function, "prelude": prelude}
        requests = [{"args": call["args"], "kwargs": call.get("kwargs", {})} for call in calls]
        return _completed(self._answered(job, requests), len(calls))

    def asserts(
        self, program: str, function: str, setup: str, tests: Sequence[str], prelude: str = ""
    ) -> list[Outcome]:
        """Run test code that calls the program's function. The program runs in another sandbox than the tests."""
        return _completed(self._judged(program, function, setup, tests, prelude), len(tests))

    def _answered(self, job: dict[str, Any], requests: Sequence[dict[str, Any]]) -> Iterator[Outcome]:
        with SandboxProcess(job, self.limits, self.isolated) as process:
            for request in requests:
                process.send(request)
            for _ in requests:
                yield _outcome(process.receive())

    def _judged(self, program: str, function: str, setup: str, tests: Sequence[str], prelude: str) -> Iterator[Outcome]:
        job = {"mode": "calls", "program": program, "function": function, "prelude": prelude}
        asks = {"mode": "asserts", "program": setup, "function": function}
        with (
            SandboxProcess(job, self.limits, self.isolated) as candidate,
            SandboxProcess(asks, self.limits, self.isolated) as judge,
        ):
            for test in tests:
                judge.send({"test": test})

                # The program can reach the tests only by the value of each call.
                while "call" in (message := judge.receive()):
                    candidate.send(message["call"])
                    judge.send(_answer(_outcome(candidate.receive())))
                passed = message.get("passed") is True
                yield Outcome("ok" if passed else "error", printable(message.get("why", ""), _REASON_CHARS))


def _completed(outcomes: Iterator[Outcome], count: int) -> list[Outcome]:
    """Return `count` outcomes. Those that are missing when the program ends have the status "ended"."""
    given: list[Outcome] = []
    try:
        for outcome in outcomes:
            given.append(outcome)
    except Ended as e:
        given += [Outcome("ended", str(e))] * (count - len(given))
    return given


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
        return Outcome("ok", "", stdout, codec.decode(codec.parse(result)))
    except codec.Unencodable as e:
        return Outcome("form", str(e)[:_REASON_CHARS], stdout)


def _answer(outcome: Outcome) -> dict[str, Any]:
    """Return the message that answers a call of the program's function by a test (runner.asserts)."""
    if outcome.status == "ok":
        return {"value": codec.encode(outcome.value)}
    return {"raised": outcome.reason if outcome.status == "error" else outcome.status}
