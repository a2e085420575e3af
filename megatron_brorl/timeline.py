"""What a rank does when: the spans of one step, from which come the figures of a cluster and its trace.

The recorder is an ambient one, like torch.profiler's: code names what it does with `span`, and whoever wants to know
calls `record` first. Without that a span moves this process's `position` alone, which hang.py has others see.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


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


_UNEVEN = frozenset({"forward"})  # spans that ranks pass as often as they have rows for


class Position:
    """How far this process is. Spans are those of the thread that trains; any thread may `beat`."""

    def __init__(self) -> None:
        self.step: int | None = None  # the number in metrics.jsonl of the current step; None: no step has begun
        self.path: list[tuple[str, float]] = []  # spans begun and not ended, each with its limit
        self.passed = 0  # begins and ends of spans that all ranks pass in the same order
        self.finished = 0  # pieces of work, of any kind
        self._numbers = itertools.count(1)  # whose next() needs no lock
        self.moved: Callable[[], object] = lambda: None  # called at the begin and the end of every span

    def beat(self) -> None:
        """Something is done: a rollout, a verdict, a micro-batch, a tensor on its way, a span."""
        self.finished = next(self._numbers)

    def enter(self, name: str, limit_s: float) -> None:
        """Begin a span."""
        self.path.append((name, limit_s))
        self._pass(name)

    def leave(self) -> None:
        """End the innermost span."""
        self._pass(self.path.pop()[0])

    def _pass(self, name: str) -> None:
        self.passed += name not in _UNEVEN
        self.beat()
        self.moved()

    def where(self) -> str:
        """The step and the spans that it is in, the outer ones first."""
        names = " > ".join(name for name, _ in self.path) or "between phases"
        return f"step {self.step}, {names}" if self.step is not None else names

    def limit_s(self) -> float:
        """Seconds that may pass here without a beat, because something else watches what is waited for."""
        return max((limit for _, limit in self.path), default=0.0)


_current: ContextVar[Timeline | None] = ContextVar("timeline", default=None)
position = Position()


def each_beats(items: Iterable[T]) -> Iterator[T]:
    """The items, of which each that is asked for counts as progress."""
    for item in items:
        position.beat()
        yield item


def record(timeline: Timeline | None) -> None:
    """Let this thread's spans go to `timeline` from now on; None: they are not kept."""
    _current.set(timeline)


@contextlib.contextmanager
def span(name: str, limit_s: float = 0.0) -> Iterator[dict[str, float]]:
    """A span of the timeline that is being recorded, if there is one, and of `position`.

    limit_s: seconds after which something else ends what is waited for here, as rollout.timeout_s does; 0 = nothing.
    """
    current = _current.get()
    recorded: contextlib.AbstractContextManager[dict[str, float]] = contextlib.nullcontext({})
    if current:
        recorded = current.span(name)
    position.enter(name, limit_s)
    try:
        with recorded as values:
            yield values
    finally:
        position.leave()
