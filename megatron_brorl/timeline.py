"""What a rank does when: the spans of one step, from which come the figures of a cluster and its trace.

The recorder is an ambient one, like torch.profiler's: code names what it does with `span`, and whoever wants to know
calls `record` first. Without that a span does nothing.
"""

from __future__ import annotations

import contextlib
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


def record(timeline: Timeline | None) -> None:
    """Let this thread's spans go to `timeline` from now on; None: they are not kept."""
    _current.set(timeline)


def span(name: str) -> contextlib.AbstractContextManager[dict[str, float]]:
    """A span of the timeline that is being recorded, if there is one."""
    current = _current.get()
    return current.span(name) if current else contextlib.nullcontext({})
