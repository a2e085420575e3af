"""Tests that the caller of a worker process survives when it fails or hangs. test_worker_pool.py tests calls."""

import os
import signal
import subprocess
import sys
from contextlib import closing

import psutil
import pytest

from megatron_brorl.rewards import worker_process
from megatron_brorl.rewards.worker_process import WorkerLostError, WorkerProcess, call_in_worker

MODULE = """
import time

def sleeper(name):
    return time.sleep

def missing(name):
    raise KeyError(name)
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "callables.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_call_of_many_megabytes_passes_through_the_pipe():
    assert call_in_worker("builtins:len", b"x" * (1 << 24)) == 1 << 24


def test_a_failing_constructor_gives_its_reason():
    with closing(WorkerProcess("callables:missing")) as worker:
        with pytest.raises(WorkerLostError, match=r"^KeyError: 'a'$") as lost:
            list(worker.run([("a", ())], seconds=10.0))
        assert not lost.value.during_call
        with pytest.raises(WorkerLostError):
            list(worker.run([("a", ())], seconds=10.0))


def test_a_frozen_worker_times_out(monkeypatch):
    monkeypatch.setattr(worker_process, "START_S", 0.2)
    for size in (1, 1 << 20):  # The larger call does not fit into the pipe.
        with closing(WorkerProcess("callables:sleeper")) as worker:
            os.kill(worker.pid, signal.SIGSTOP)
            with pytest.raises(WorkerLostError, match=r"^no answer in 0\.2 s$") as lost:
                list(worker.run([("a", ("x" * size,))], seconds=10.0))
        assert not lost.value.during_call
        assert not psutil.pid_exists(worker.pid)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 60.0], ids=["idle", "in a call"])
def test_a_worker_dies_with_its_parent(seconds, tmp_path):
    code = f"""
import sys, time
sys.path.insert(0, {str(tmp_path)!r})
from megatron_brorl.rewards.worker_process import WorkerProcess
worker = WorkerProcess("callables:sleeper")
list(worker.run([("a", (0,))], seconds=60.0))
print(worker.pid, flush=True)
list(worker.run([("a", ({seconds},))], seconds=60.0))
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    worker.wait(15)
