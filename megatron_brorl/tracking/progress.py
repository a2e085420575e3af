"""How far a command has come: a live display on a terminal, one plain line per step anywhere else."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_WINDOW = 20  # steps that the time left is averaged over

Clock = Callable[[], float]


class Progress(Protocol):
    """What `progress` yields. A display that cannot be written to is given up, never the run."""

    def update(self, step_done: int, metrics: dict[str, str]) -> None:
        """`step_done` steps of the total are behind us; `metrics` are a few worth watching, by label."""

    def note(self, text: str) -> None:
        """Say something that stays: above the bar, or as a line of its own."""


@contextlib.contextmanager
def progress(
    total: int,
    title: str,
    enabled: bool,
    *,
    start: int = 0,
    stream: TextIO | None = None,
    clock: Clock = time.monotonic,
) -> Iterator[Progress]:
    """Show the progress of `total` steps, `start` of them done by an earlier process, on `stream` (stderr).

    With `enabled` false (every rank but one) nothing is shown.
    """
    stream = stream if stream is not None else sys.stderr
    pace = _Pace(total, start, clock)
    if not enabled:
        yield _Silent()
    # The stream decides, not rich: FORCE_COLOR must not put control codes into a log file.
    elif not stream.isatty() or (console := Console(file=stream)).is_dumb_terminal:
        yield _Plain(title, pace, stream)
    else:
        display = _Live(title, pace, console)
        with display.live:
            yield display


class _Pace:
    """Elapsed time, and the time left from the mean of the last steps."""

    def __init__(self, total: int, start: int, clock: Clock) -> None:
        self.total = total
        self.done = start
        self._clock = clock
        self._began = clock()
        self._marks: deque[tuple[int, float]] = deque([(start, self._began)], maxlen=_WINDOW + 1)

    def mark(self, done: int) -> None:
        if done > self.done:
            self.done = done
            self._marks.append((done, self._clock()))

    def elapsed(self) -> float:
        return self._clock() - self._began

    def left(self) -> float | None:
        """Seconds to go; None while no step has been timed."""
        if self.done >= self.total:
            return 0.0
        (first, began), (last, ended) = self._marks[0], self._marks[-1]
        if last == first:
            return None
        per_step = (ended - began) / (last - first)
        return max(0.0, per_step * (self.total - last) - (self._clock() - ended))


class _Silent:
    def update(self, step_done: int, metrics: dict[str, str]) -> None:
        pass

    def note(self, text: str) -> None:
        pass


class _Plain:
    def __init__(self, title: str, pace: _Pace, stream: TextIO) -> None:
        self._title, self._pace, self._stream = title, pace, stream

    def update(self, step_done: int, metrics: dict[str, str]) -> None:
        self._pace.mark(step_done)
        parts = [f"{self._title} {step_done}/{self._pace.total}", *_times(self._pace), *_pairs(metrics)]
        self.note("  ".join(parts))

    def note(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the log is on a full disk, or nobody reads the pipe any more
            print(text, file=self._stream, flush=True)


class _Live:
    def __init__(self, title: str, pace: _Pace, console: Console) -> None:
        self._title, self._pace = title, pace
        self._metrics: dict[str, str] = {}
        self.live = Live(
            get_renderable=self._render,
            console=console,
            refresh_per_second=2,  # the clock goes on during a long step
            redirect_stdout=sys.stdout.isatty(),  # a piped stdout keeps its bytes
        )

    def update(self, step_done: int, metrics: dict[str, str]) -> None:
        self._pace.mark(step_done)
        self._metrics = metrics
        with contextlib.suppress(OSError):
            self.live.refresh()

    def note(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self.live.console.print(Text(text))

    def _render(self) -> Group:
        pace = self._pace
        # A bar of length 0 would divide by it; no steps at all is a full bar.
        total, done = (pace.total, pace.done) if pace.total > 0 else (1, 1)
        row = Table.grid(padding=(0, 2))
        row.add_row(
            Text(self._title, style="bold", no_wrap=True),
            ProgressBar(total=total, completed=done, width=24),
            Text(f"{pace.done}/{pace.total}", no_wrap=True),
            *(Text(text, style="cyan", no_wrap=True) for text in _times(pace)),
        )
        metrics = Text("  ".join(_pairs(self._metrics)), no_wrap=True, overflow="ellipsis")
        return Group(row, metrics) if self._metrics else Group(row)


def _times(pace: _Pace) -> list[str]:
    left = pace.left()
    return [f"elapsed {_duration(pace.elapsed())}", f"left {'?' if left is None else _duration(left)}"]


def _pairs(metrics: dict[str, str]) -> list[str]:
    return [f"{name} {value}" for name, value in metrics.items()]


def _duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
