"""Progress of a command: a live display on a terminal, one plain line per step anywhere else."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_WINDOW = 20  # steps over which the time per step is averaged

Clock = Callable[[], float]


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
    """Show the progress of `total` steps on `stream` (stderr). An earlier process has done `start` of them.

    With `enabled` false (every rank but one) nothing is shown.
    """
    stream = stream or sys.stderr
    display = Progress(total, title, start, stream if enabled else None, clock)
    # The stream decides and not rich, because FORCE_COLOR must not put control codes into a log file.
    if enabled and stream.isatty() and not (console := Console(file=stream)).is_dumb_terminal:
        display.live = Live(
            get_renderable=display.render,
            console=console,
            refresh_per_second=2,  # the clock runs on during a long step
            redirect_stdout=sys.stdout.isatty(),  # a piped stdout keeps its bytes
        )
    with display.live or contextlib.nullcontext():
        yield display


class Progress:
    """Steps done, elapsed time, time left and a few metrics. A stream that cannot be written to is ignored."""

    def __init__(self, total: int, title: str, start: int, stream: TextIO | None, clock: Clock) -> None:
        self.live: Live | None = None
        self._total = total
        self._title = title
        self._stream = stream
        self._clock = clock
        self._done = start
        self._metrics: dict[str, str] = {}
        self._began = clock()
        self._marks = deque([(start, self._began)], maxlen=_WINDOW + 1)  # (steps done, time)

    def update(self, step_done: int, metrics: dict[str, str]) -> None:
        """Record that `step_done` steps are done. metrics: a few to show, by label."""
        if step_done > self._done:
            self._done = step_done
            self._marks.append((step_done, self._clock()))
        self._metrics = metrics
        if self.live:
            with contextlib.suppress(OSError):
                self.live.refresh()
        else:
            self.note(self._line())

    def note(self, text: str) -> None:
        """Print a line that stays, above the live display if there is one."""
        with contextlib.suppress(OSError):  # a full disk or a closed pipe
            if self.live:
                self.live.console.print(Text(text))
            elif self._stream:
                print(text, file=self._stream, flush=True)

    def render(self) -> Table:
        """Return the live display."""
        # A bar of length 0 would divide by zero. No steps at all are shown as a full bar.
        total, done = (self._total, self._done) if self._total > 0 else (1, 1)
        row = Table.grid(padding=(0, 1))
        line = Text(self._line(), no_wrap=True, overflow="ellipsis")
        row.add_row(ProgressBar(total=total, completed=done, width=24), line)
        return row

    def _line(self) -> str:
        left = self._seconds_left()
        times = [
            f"elapsed {_duration(self._clock() - self._began)}",
            f"left {'?' if left is None else _duration(left)}",
        ]
        metrics = [f"{name} {value}" for name, value in self._metrics.items()]
        return "  ".join([f"{self._title} {self._done}/{self._total}", *times, *metrics])

    def _seconds_left(self) -> float | None:
        """Return the time left by the mean of the last steps; None while no step has been timed."""
        if self._done >= self._total:
            return 0.0
        first, began = self._marks[0]
        last, ended = self._marks[-1]
        if last == first:
            return None
        per_step = (ended - began) / (last - first)
        return max(0.0, per_step * (self._total - last) - (self._clock() - ended))


def _duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
