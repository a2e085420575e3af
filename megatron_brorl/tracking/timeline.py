"""Timed spans of a rank's step, for the metrics of phases and for traces.

Recording is ambient, as in torch.profiler: code names its phases with `span`, and a caller that wants them calls
`record` first. Spans also show progress: `dump_stacks_after` prints the stacks of a process that makes none, and
parallel.network names the ranks that the others wait for.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class Span:
    """One phase of a rank's step."""

    name: str
    begin: float  # seconds of the timeline's clock
    end: float
    values: dict[str, float]  # counts of the phase, such as tokens

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass
class Timeline:
    """The spans of one thread in the order in which they ended."""

    clock: Callable[[], float] = time.monotonic
    spans: list[Span] = field(default_factory=list)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[dict[str, float]]:
        """Record the body. Values may be added to the result, also after the end of the body."""
        values: dict[str, float] = {}
        begin = self.clock()
        try:
            yield values
        finally:
            self.spans.append(Span(name, begin, self.clock(), values))

    def seconds(self, name: str) -> float:
        """Return the total duration of the spans with this name."""
        return sum(s.seconds for s in self.spans if s.name == name)

    def total(self, name: str, key: str) -> float:
        """Return the sum of a value over the spans with this name."""
        return sum(s.values.get(key, 0.0) for s in self.spans if s.name == name)


class Place(NamedTuple):
    """The position of this process in its program."""

    changes: int  # number of begins and ends of spans so far
    name: str  # of the innermost open span
    due: float  # value of time.monotonic() at the last change, plus the longest allowance of the open spans


_current: ContextVar[Timeline | None] = ContextVar("timeline", default=None)
_open: list[tuple[str, float]] = []  # names and allowances in seconds of the open spans
_counts: dict[int, tuple[int, int, float]] = {}  # number of open spans -> parts done, all parts, begin
_place = Place(0, "", 0.0)
_dump_after_s = 0.0


def dump_stacks_after(seconds: float) -> None:
    """Print all stacks to stderr if no span begins or ends for `seconds` + the longest open allowance; 0: never."""
    global _dump_after_s
    _dump_after_s = seconds
    if seconds:
        _changed()
    else:
        faulthandler.cancel_dump_traceback_later()


def place() -> Place:
    """Return the current position of this process."""
    return _place


def count(done: int, total: int) -> None:
    """Show that `done` of `total` parts of the innermost open span are done. This does not count as progress."""
    _, _, begin = _counts.get(len(_open), (0, 0, time.monotonic()))
    _counts[len(_open)] = done, max(done, total), begin


def phase() -> tuple[list[str], int, int, float]:
    """Return the names of the open spans, and parts done, all parts and seconds of the innermost one with a count."""
    done, total, begin = _counts.get(max([*_counts], default=0), (0, 0, 0.0))
    return [name for name, _ in [*_open]], done, total, time.monotonic() - begin  # [*...]: other threads change them


def _changed() -> None:
    global _place
    allowance_s = max((seconds for _, seconds in _open), default=0.0)
    _place = Place(_place.changes + 1, _open[-1][0] if _open else "no phase", time.monotonic() + allowance_s)
    if _dump_after_s and sys.__stderr__:
        # Stacks that are printed together are mixed up, so each rank of a machine has its own slots of 0.1 seconds.
        rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        wait_s = _dump_after_s + allowance_s
        wait_s += (0.1 * rank - time.monotonic() - wait_s) % (0.1 * ranks)
        faulthandler.dump_traceback_later(wait_s, file=sys.__stderr__)


def record(timeline: Timeline | None) -> None:
    """Add the spans of this thread to `timeline` from now on; None stops recording."""
    _current.set(timeline)


@contextlib.contextmanager
def span(name: str, allowance_s: float = 0.0) -> Iterator[dict[str, float]]:
    """Record the body in the timeline that is being recorded, if there is one.

    allowance_s: a timeout that ends the body by itself, such as rollout.timeout_s, in seconds; 0 = none.
    """
    _open.append((name, allowance_s))
    _changed()
    try:
        with (_current.get() or Timeline()).span(name) as values:
            yield values
    finally:
        _counts.pop(len(_open), None)
        _open.pop()
        _changed()


@contextlib.contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add the wall-clock seconds of the block to a phase."""
    begun = time.monotonic()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.monotonic() - begun
