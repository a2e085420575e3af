"""What a rank does when: the spans of one step, from which come the figures of a cluster and its trace.

The recorder is an ambient one, like torch.profiler's: code names what it does with `span`, and whoever wants to know
calls `record` first. Spans also show progress: `dump_stacks_after` prints the stacks of a process that makes none.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Span:
    """Something that a rank did."""

    name: str
    begin: float  # seconds of the recorder's clock
    end: float
    values: dict[str, float]  # what came of it

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.begin


@dataclass
class Timeline:
    """The spans of one thread, each noted at its end."""

    clock: Callable[[], float] = time.monotonic
    spans: list[Span] = field(default_factory=list)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[dict[str, float]]:
        """Record the body; what is put into the result goes with it, also after its end."""
        values: dict[str, float] = {}
        begin = self.clock()
        try:
            yield values
        finally:
            self.spans.append(Span(name, begin, self.clock(), values))

    def seconds(self, name: str) -> float:
        """Of all spans of this name."""
        return sum(s.seconds for s in self.spans if s.name == name)

    def total(self, name: str, key: str) -> float:
        """The sum of a value over all spans of this name."""
        return sum(s.values.get(key, 0.0) for s in self.spans if s.name == name)


_current: ContextVar[Timeline | None] = ContextVar("timeline", default=None)
_limits: list[float] = []  # of the spans that have begun and not ended
_dump_after_s = 0.0


def dump_stacks_after(seconds: float) -> None:
    """Print the stacks of all threads to stderr when no span begins or ends for so long, plus the limit of a span.

    0 turns it off.
    """
    global _dump_after_s
    _dump_after_s = seconds
    if seconds:
        _restart_countdown()
    else:
        faulthandler.cancel_dump_traceback_later()


def _restart_countdown() -> None:
    if _dump_after_s and sys.__stderr__:
        faulthandler.dump_traceback_later(_dump_after_s + max(_limits, default=0.0), file=sys.__stderr__)


def record(timeline: Timeline | None) -> None:
    """Let this thread's spans go to `timeline` from now on; None: they are not kept."""
    _current.set(timeline)


@contextlib.contextmanager
def span(name: str, limit_s: float = 0.0) -> Iterator[dict[str, float]]:
    """Record the body in the timeline that is being recorded, if there is one.

    limit_s: seconds that the body may take because something else ends it, as rollout.timeout_s does; 0 = nothing.
    """
    current = _current.get()
    recorded: contextlib.AbstractContextManager[dict[str, float]] = contextlib.nullcontext({})
    if current:
        recorded = current.span(name)
    _limits.append(limit_s)
    _restart_countdown()
    try:
        with recorded as values:
            yield values
    finally:
        _limits.pop()
        _restart_countdown()
