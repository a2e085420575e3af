"""Progress of a command: a live display on a terminal, anywhere else a line per step and in every long phase."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_brorl.tracking import timeline

_WINDOW = 20  # steps over which the time per step is averaged
_SILENCE_S = 20.0  # longest time without a line
_MAX_EXTRAPOLATION = 20  # A phase shows its time left once 1/20 of its parts is done.

# Texts of spans, with the innermost count. While "evaluate" is open, its text is shown, otherwise the innermost span's.
_PHASES = {
    "collect": "collecting groups",
    "evaluate": "evaluating {} samples{}",
    "generate": "generating {} rollouts{}",
    "score": "scoring",
    "experience": "computing log-probabilities",
    "update": "updating, {} optimizer steps",
    "weight_sync": "sending weights",
}

Clock = Callable[[], float]


@contextlib.contextmanager
def progress(
    total: int, title: str, enabled: bool = True, *, stream: TextIO | None = None, clock: Clock = time.monotonic
) -> Iterator[Progress]:
    """Show steps done of `total` (0: unknown) and the phase on `stream` (stderr) of rank 0, if `enabled`."""
    enabled = enabled and os.environ.get("RANK", "0") == "0"
    stream = stream or sys.stderr
    display = Progress(total, title, stream if enabled else None, clock)
    # The stream decides and not rich, because FORCE_COLOR must not put control codes into a log file.
    if enabled and stream.isatty() and not (console := Console(file=stream)).is_dumb_terminal:
        # The cursor stays visible, because a signal may end the process before it could be shown again.
        console.show_cursor = lambda show=True: False  # type: ignore[method-assign]
        display.live = Live(
            get_renderable=display.render,
            console=console,
            transient=not total,
            refresh_per_second=2,  # the clock runs on during a long step
            redirect_stdout=sys.stdout.isatty(),  # a piped stdout keeps its bytes
        )
    ended = threading.Event()
    if enabled and not display.live:
        threading.Thread(target=display.report_phases, args=(ended,), daemon=True).start()
    try:
        with display.live or contextlib.nullcontext():
            yield display
    finally:
        ended.set()


class Progress:
    """Steps done, elapsed time, time left and a few metrics. A stream that cannot be written to is ignored."""

    def __init__(self, total: int, title: str, stream: TextIO | None, clock: Clock) -> None:
        self.live: Live | None = None
        self._total = total
        self._title = title
        self._stream = stream
        self._clock = clock
        self._done = 0
        self._step_s = 0.0  # estimated seconds of sampling in a step
        self._metrics: dict[str, str] = {}
        self._steps_left = math.inf
        self._began = self._last_line = clock()
        self._marks = deque([(0, self._began)], maxlen=_WINDOW + 1)  # (steps done, time)

    def begin(self, total: int, start: int = 0) -> None:
        """Measure the time per step from now on. start: steps that an earlier process has done."""
        self._total, self._done = total, start
        self._marks = deque([(start, self._clock())], maxlen=_WINDOW + 1)

    def stop(self) -> None:
        """Remove the live display, so that later output is not wrapped at the width of the terminal."""
        if self.live:
            self.live.stop()

    def report_phases(self, ended: threading.Event) -> None:
        """Print a line whenever there was none for _SILENCE_S, until `ended` is set."""
        while not ended.wait(_SILENCE_S / 10):
            if self._clock() - self._last_line >= _SILENCE_S:
                self.note("  ".join(self._state()))

    def update(self, step_done: int, metrics: dict[str, str], steps_left: float = math.inf) -> None:
        """Record that `step_done` steps are done. metrics: a few to show, by label. steps_left: upper bound."""
        self._steps_left = steps_left
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
        self._last_line = self._clock()
        with contextlib.suppress(OSError):  # a full disk or a closed pipe
            if self.live:
                self.live.console.print(Text(text))
            elif self._stream:
                print(text, file=self._stream, flush=True)

    def render(self) -> Table:
        row = Table.grid(padding=(0, 1))
        line = Text(self._line(), no_wrap=True, overflow="ellipsis")
        row.add_row(ProgressBar(total=self._total or 1, completed=self._done, width=24), line)
        return row

    def _line(self) -> str:
        return "  ".join([*self._state(), *(f"{name} {value}" for name, value in self._metrics.items())])

    def _state(self) -> list[str]:
        """Return steps done, phase and times."""
        names, done, total, seconds = timeline.phase()
        known = [name for name in names if name in _PHASES]
        text = _PHASES["evaluate" if "evaluate" in known else known[-1]] if known else "".join(names[-1:])
        rank_text = " on rank 0" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
        text = " ".join(text.format(f"{done:,} of {total:,}" if total else "", rank_text).split())
        # Most rollouts of a batch end together, so the time of the first ones says little about the others.
        is_known = 0 < total <= _MAX_EXTRAPOLATION * done
        phase_left_s = seconds / done * (total - done) if is_known else 0.0
        if is_known:
            text += f" ({_duration(phase_left_s)} left)"
        if is_known and "round" in names:
            self._step_s = seconds + phase_left_s

        left_s = self._seconds_left()
        remaining = "?" if left_s is None else _duration(left_s)
        if left_s is None and self._step_s:  # in the first step, whose other phases take time, too
            remaining = f"over {_duration(self._step_s * (self._total - self._done - 1) + phase_left_s)}"
        return [
            f"{self._title} {self._done}/{self._total}" if self._total else self._title,
            *filter(None, [text]),
            f"elapsed {_duration(self._clock() - self._began)}",
            f"left {remaining}",
        ]

    def _seconds_left(self) -> float | None:
        """Return the time left by the mean of the last steps; None while no step has been timed."""
        if self._done >= self._total:
            return 0.0 if self._total else None
        first, began = self._marks[0]
        last, ended = self._marks[-1]
        if last == first:
            return None
        per_step = (ended - began) / (last - first)
        return max(0.0, per_step * min(self._total - last, self._steps_left) - (self._clock() - ended))


def _duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
