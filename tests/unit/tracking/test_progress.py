"""Test the progress display with a clock that the test controls."""

from __future__ import annotations

import io
import time

import pytest

from megatron_brorl.config.schema import TrainConfig
from megatron_brorl.tracking import progress as tracking_progress
from megatron_brorl.tracking import timeline
from megatron_brorl.tracking.progress import progress
from megatron_brorl.train.state import RunState


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_one_plain_line_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # must not put control codes into a pipe
    clock, out = _Clock(), io.StringIO()
    with progress(3, "train", stream=out, clock=clock) as display:
        clock.now += 10
        display.update(1, {"reward": "0.25", "loss": "1e-3"})
        display.note("saved [step 1]")
        clock.now += 20
        display.update(2, {})
        clock.now += 3600
        display.update(3, {"reward": "0.50"})
    assert out.getvalue() == (
        "train 1/3  elapsed 0:10  left 0:20  reward 0.25  loss 1e-3\n"
        "saved [step 1]\n"
        "train 2/3  elapsed 0:30  left 0:15\n"
        "train 3/3  elapsed 1:00:30  left 0:00  reward 0.50\n"
    )


def test_time_left_follows_the_last_twenty_steps() -> None:
    clock, out = _Clock(), io.StringIO()
    with progress(100, "t", stream=out, clock=clock) as display:
        for step in range(1, 41):
            clock.now += 60 if step <= 20 else 1
            display.update(step, {})
    assert out.getvalue().splitlines()[19].endswith("left 1:20:00")  # 80 steps of 60 s
    assert out.getvalue().splitlines()[39].endswith("left 1:00")  # 60 steps of 1 s


def test_time_left_of_a_run_with_a_limit_in_seconds() -> None:
    """After 3 steps and 30 of 120 seconds, 9 steps are left, each of which takes 12 s with its evaluation."""
    clock, out = _Clock(), io.StringIO()
    state = RunState(step=3, trained_s=30.0)
    assert RunState(step=3, trained_s=130.0).steps_left(TrainConfig(max_seconds=120.0)) == 0
    with progress(1000, "train", stream=out, clock=clock) as display:
        clock.now += 36
        display.update(3, {}, state.steps_left(TrainConfig(max_seconds=120.0)))
        display.update(3, {}, state.steps_left(TrainConfig()))
    assert out.getvalue() == "train 3/1000  elapsed 0:36  left 1:48\ntrain 3/1000  elapsed 0:36  left 3:19:24\n"


def test_time_left_of_a_resumed_run_ignores_earlier_steps() -> None:
    clock, out = _Clock(), io.StringIO()
    with progress(100, "train", stream=out, clock=clock) as display:
        display.begin(100, start=90)
        display.update(90, {})
        clock.now += 5
        display.update(91, {})
    assert out.getvalue() == "train 90/100  elapsed 0:00  left ?\ntrain 91/100  elapsed 0:05  left 0:45\n"


@pytest.mark.parametrize(
    ("phases", "done", "total", "expected"),
    [
        (["evaluate", "generate"], 40, 160, "evaluating 40 of 160 samples (9:00 left)  elapsed 0:01  left ?"),
        (["round", "generate"], 500, 2000, "500 of 2,000 rollouts (9:00 left)  elapsed 0:01  left over 1:45:00"),
    ],
)
def test_a_long_phase_shows_its_count(monkeypatch, phases, done, total, expected) -> None:
    monkeypatch.setattr(timeline, "phase", lambda: (phases, done, total, 180.0))
    monkeypatch.setattr(tracking_progress, "_SILENCE_S", 0.1)
    clock, out = _Clock(), io.StringIO()
    with progress(9, "train", stream=out, clock=clock):
        clock.now += 1
        while not out.getvalue():
            time.sleep(0.01)
    assert expected in out.getvalue()


def test_a_terminal_gets_a_live_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    clock, out = _Clock(), _Terminal()
    with progress(4, "train", stream=out, clock=clock) as display:
        clock.now += 10
        display.update(1, {"reward": "0.25"})
        display.note("saved [bold] step 1")
    text = out.getvalue()
    for part in ("train", "1/4", "elapsed 0:10", "left 0:30", "reward 0.25", "saved [bold] step 1", "\x1b[2K"):
        assert part in text
    assert "\x1b[?25l" not in text  # the cursor is not hidden, because a signal may end the process


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    out = _Terminal()
    with progress(1, "train", stream=out, clock=_Clock()) as display:
        display.update(1, {})
    assert out.getvalue() == "train 1/1  elapsed 0:00  left 0:00\n"


def test_a_closed_stream_does_not_end_the_run() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with progress(1, "train", stream=Gone(), clock=_Clock()) as display:
        display.update(1, {})
        display.note("hello")
