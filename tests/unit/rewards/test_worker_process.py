"""Tests that a worker process keeps objects between calls, and that its caller survives when it fails or hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megatron_brorl.rewards import worker_process
from megatron_brorl.rewards.worker_process import WorkerLostError, WorkerProcess, call_in_worker

MODULE = """
import time

class Counter:
    def __init__(self, name):
        self.name, self.count = name, 0

    def __call__(self, step, sleep=0.0):
        time.sleep(sleep)
        self.count += step
        return [self.name, self.count]

def missing(name):
    raise KeyError(name)
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counters.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_objects_keep_their_state_between_calls() -> None:
    with WorkerProcess("counters:Counter") as worker:
        assert list(worker.run([("a", (1,)), ("b", (5,)), ("a", (2,))], 10.0)) == [["a", 1], ["b", 5], ["a", 3]]
        assert list(worker.run([("a", (4,))], 10.0)) == [["a", 7]]
        assert list(worker.run([], 10.0)) == []


def test_a_call_of_many_megabytes_passes_through_the_pipe() -> None:
    assert call_in_worker("builtins:len", b"x" * (1 << 24)) == 1 << 24


def test_a_slow_call_raises_after_earlier_results_are_delivered() -> None:
    with WorkerProcess("counters:Counter") as worker:
        results = worker.run([("a", (1,)), ("a", (1, 60.0))], 1.0)
        assert next(results) == ["a", 1]
        with pytest.raises(WorkerLostError, match=r"^no answer in 1 s$") as lost:
            next(results)
    assert (lost.value.during_call, lost.value.timed_out) == (True, True)


def test_a_failing_constructor_gives_its_reason() -> None:
    with WorkerProcess("counters:missing") as worker:
        with pytest.raises(WorkerLostError, match=r"^KeyError: 'a'$") as lost:
            list(worker.run([("a", ())], 10.0))
        assert not lost.value.during_call
        with pytest.raises(WorkerLostError):
            list(worker.run([("a", ())], 10.0))


def test_a_frozen_worker_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "START_S", 0.2)
    for size in (1, 1 << 20):  # The larger call does not fit into the pipe.
        with WorkerProcess("counters:Counter") as worker:
            os.kill(worker.pid, signal.SIGSTOP)
            with pytest.raises(WorkerLostError, match=r"^no answer in 0\.2 s$") as lost:
                list(worker.run([("a", ("x" * size,))], 10.0))
        assert not lost.value.during_call
        assert not psutil.pid_exists(worker.pid)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 60.0], ids=["idle", "in a call"])
def test_a_worker_dies_with_its_parent(seconds: float, tmp_path: Path) -> None:
    code = f"""
import sys, time
sys.path.insert(0, {str(tmp_path)!r})
from megatron_brorl.rewards.worker_process import WorkerProcess
worker = WorkerProcess("counters:Counter")
list(worker.run([("a", (1,))], 60.0))
print(worker.pid, flush=True)
list(worker.run([("a", (1, {seconds}))], 60.0))
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    worker.wait(15)
