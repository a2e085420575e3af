"""A program and its tests in a sandbox of their own: one outcome per test, whatever the program does.

Only inputs go in. What comes out is text or values of builtin types, for the caller to compare.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_brorl.rewards.sandbox.inside import codec
from megatron_brorl.rewards.sandbox.isolation import Limits
from megatron_brorl.rewards.sandbox.process import Ended, SandboxProcess

Status = Literal["ok", "error", "timeout", "output", "crash", "syntax", "ended", "form"]
_STATUSES = frozenset(("ok", "error", "timeout", "output", "crash", "syntax"))  # those that are said inside
_REASONS = {"timeout": "out of time", "output": "too much output"}
_REASON_CHARS = 80


@dataclass(frozen=True)
class Outcome:
    """What became of one test.

    ok; error: it raised or exited with another code than 0; timeout; output: it wrote too much; crash: a signal ended
    it; syntax: the program does not compile; ended: its process was gone or its total time was up; form: what came back
    is no answer.
    """

    status: Status
    reason: str = ""
    stdout: str = ""
    value: Any = None  # what a function returned
    seconds: float = 0.0  # from the last outcome, or from the start, to this one


@dataclass(frozen=True)
class Sandbox:
    """Where programs run: isolated, or as reward.unsandboxed has it (probe.require says which)."""

    isolated: bool
    limits: Limits

    def run(self, program: str, stdin: str) -> Outcome:
        """The program as a script with this on its standard input."""
        return self.scripts(program, [stdin])[0]

    def scripts(self, program: str, stdins: Sequence[str]) -> list[Outcome]:
        """The program as a script, once per standard input."""
        order = {"mode": "scripts", "program": program}
        return self._outcomes(order, [{"stdin": stdin} for stdin in stdins])

    def calls(self, program: str, function: str, calls: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        """The program's function, once per {"args", "kwargs"}: encoded by inside.codec."""
        order = {"mode": "calls", "program": program, "function": function}
        return self._outcomes(order, [{"args": c["args"], "kwargs": c.get("kwargs", {})} for c in calls])

    def asserts(self, program: str, function: str, setup: str, tests: Sequence[str]) -> list[Outcome]:
        """Test code against the program's function, which runs in another sandbox than the tests."""
        outcomes: list[Outcome] = []
        try:
            for outcome in self._judged(program, function, setup, tests):
                outcomes.append(outcome)
        except Ended as e:
            outcomes += [Outcome("ended", str(e))] * (len(tests) - len(outcomes))
        return outcomes

    def _outcomes(self, order: dict[str, Any], requests: Sequence[dict[str, Any]]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        began = time.monotonic()
        try:
            with SandboxProcess(order, self.limits, self.isolated) as process:
                for request in requests:
                    process.send(request)
                for _ in requests:
                    message, now = process.receive(), time.monotonic()
                    outcomes.append(_outcome(message, now - began))
                    began = now
        except Ended as e:
            outcomes += [Outcome("ended", str(e), seconds=time.monotonic() - began)] * (len(requests) - len(outcomes))
        return outcomes

    def _judged(self, program: str, function: str, setup: str, tests: Sequence[str]) -> Iterator[Outcome]:
        order = {"mode": "calls", "program": program, "function": function}
        asks = {"mode": "judge", "program": setup, "function": function}
        with (
            SandboxProcess(order, self.limits, self.isolated) as candidate,
            SandboxProcess(asks, self.limits, self.isolated) as judge,
        ):
            for test in tests:
                began = time.monotonic()
                judge.send({"test": test})

                # The program has no other way to the tests than a value for each call.
                while "call" in (message := judge.receive()):
                    candidate.send(message["call"])
                    judge.send(_answer(_outcome(candidate.receive(), 0.0)))
                passed, why, seconds = message.get("passed"), message.get("why", ""), time.monotonic() - began
                yield Outcome("ok" if passed is True else "error", _printable(why), seconds=seconds)


def _outcome(message: Mapping[str, Any], seconds: float) -> Outcome:
    """A message from inside as an outcome; every part of it may be the program's invention."""
    status, why, stdout, result = (message.get(key, "") for key in ("status", "why", "stdout", "result"))
    if status not in _STATUSES or not all(isinstance(part, str) for part in (why, stdout, result)):
        return Outcome("form", "a message that is no outcome", seconds=seconds)
    reason = _printable(why) or _REASONS.get(status, "")
    if status != "ok":
        return Outcome(status, reason, stdout, seconds=seconds)

    # What a script returns is null.
    try:
        return Outcome("ok", "", stdout, codec.decode(codec.parse(result)), seconds)
    except codec.Unencodable as e:
        return Outcome("form", str(e)[:_REASON_CHARS], stdout, seconds=seconds)


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text[:_REASON_CHARS])


def _answer(outcome: Outcome) -> dict[str, Any]:
    """To the stand-in of inside.judge."""
    if outcome.status == "ok":
        return {"value": codec.encode(outcome.value)}
    return {"raised": outcome.reason if outcome.status == "error" else outcome.status}
