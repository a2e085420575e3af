"""Tests of the time limit of the rollout engine."""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace

import fakes
import pytest
import torch

from megatron_brorl.errors import UserError
from megatron_brorl.rollout import watchdog
from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.rollout.watchdog import Watchdog
from megatron_brorl.types import Rollout

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=12, stop_ids=(fakes.STOP,))
FIRST, SECOND = fakes.prompts(2)
REQUESTS = [Request(FIRST, key=11, n=40), Request(SECOND, key=12, n=8, first=32)]


def indices(result):
    return [[r.index for r in rollouts] for rollouts in result.rollouts]


def test_engine_within_the_limit_logs_nothing(capfd):
    engine = fakes.Engine(version=4)
    result = Watchdog(engine, timeout_s=60.0).generate(REQUESTS, SAMPLING)
    assert indices(result) == [list(range(40)), list(range(32, 40))]
    assert result.late == 0
    for request, rollouts in zip(REQUESTS, result.rollouts, strict=True):
        for rollout in rollouts:
            (tokens,) = fakes.draws(request.key, [rollout.index], SAMPLING.max_tokens)
            end = tokens.index(fakes.STOP) + 1 if fakes.STOP in tokens else 12
            assert rollout.token_ids.tolist() == tokens[:end]
    assert capfd.readouterr().err == ""


def test_late_rollouts_are_logged_and_cut(capfd):
    engine = fakes.Engine(stall={("p/0", 3), *(("p/1", i) for i in range(34, 40))}, lose={("p/0", 7)})
    result = Watchdog(engine, timeout_s=0.4, rank=5).generate(REQUESTS, SAMPLING)
    assert result.late == 8  # seven stalled rollouts and a lost one
    finishes = {(i, r.index): r.finish for i, rollouts in enumerate(result.rollouts) for r in rollouts}
    assert len(finishes) == 47
    assert {place for place, finish in finishes.items() if finish == "cut"} == {
        (0, 3),
        *((1, i) for i in range(34, 40)),
    }
    for line, seconds in zip(capfd.readouterr().err.splitlines(), ("0.2", "0.4"), strict=True):
        assert line.startswith(f"rank 5: 8 of 48 rollouts are unfinished after {seconds} s (rollout.timeout_s = 0.4)")
        assert line.endswith("2 of prompt p/0; 6 of prompt p/1")


@pytest.mark.parametrize("renew_limit", [False, True])
def test_a_renewed_limit_is_the_time_without_a_finished_rollout(renew_limit, monkeypatch):
    """The engine finishes one rollout per half of the limit, and hangs after the 40 of the first request."""
    half_passed, turn_over = threading.Semaphore(0), threading.Semaphore(0)

    class Paced(fakes.Engine):
        def generate(self, requests, sampling, callbacks=None, supply=None):
            for i in itertools.count():
                half_passed.acquire()
                if i < 40:
                    callbacks.finished(0, Rollout(i, torch.zeros(1), torch.zeros(1), "stop"))
                turn_over.release()
                if callbacks.cancelled():
                    break
            return [[], []]

    class HalfOfTheLimit(threading.Event):
        def wait(self, timeout=None):
            half_passed.release()
            return turn_over.acquire(timeout=60) and self.is_set()

    fake_threading = SimpleNamespace(Event=HalfOfTheLimit, Lock=threading.Lock, Thread=threading.Thread)
    monkeypatch.setattr(watchdog, "threading", fake_threading)
    result = Watchdog(Paced(), timeout_s=60.0, grace_s=0.0).generate(REQUESTS, SAMPLING, renew_limit=renew_limit)
    # Without a new limit there are two halves, and the engine sees the cancellation after a third rollout.
    assert indices(result) == [list(range(40 if renew_limit else 3)), []]
    assert result.late == (8 if renew_limit else 47)


def test_stuck_engine_is_abandoned(capfd):
    """The engine's finished rollouts count. Later it gets no requests and no weights, but the weight stream is read."""
    release = threading.Event()
    engine = fakes.Engine(stall={("p/0", 3)}, deaf=release, version=1)
    dog = Watchdog(engine, timeout_s=0.2, grace_s=0.2)
    begun = time.monotonic()
    result = dog.generate(REQUESTS, SAMPLING)
    assert time.monotonic() - begun < 30  # far below the time that the engine hangs
    assert indices(result) == [[i for i in range(40) if i != 3], list(range(32, 40))]
    assert dog.stuck
    assert "the engine did not stop and is abandoned: 1 of prompt p/0" in capfd.readouterr().err
    stream = iter([("a", torch.zeros(1)), ("b", torch.zeros(1))])
    dog.update_weights(stream, version=2)
    assert list(stream) == []
    assert engine.version == 1
    with pytest.raises(UserError, match="rank 0: the rollout engine still hangs"):
        dog.generate(REQUESTS, SAMPLING)
    release.set()
    assert len(engine.calls) == 1


def test_exceptions_of_the_engine_are_raised_here():
    class Broken(fakes.Engine):
        def generate(self, requests, sampling, callbacks=None, supply=None):
            raise ZeroDivisionError("in the engine")

    class Confused(fakes.Engine):
        def generate(self, requests, sampling, callbacks=None, supply=None):
            stranger = Rollout(40, torch.zeros(1), torch.zeros(1), "stop")
            return [[stranger] for _ in requests]

    dog = Watchdog(Broken(), timeout_s=60.0)
    for _ in range(2):  # the thread survives an exception
        with pytest.raises(ZeroDivisionError, match="in the engine"):
            dog.generate(REQUESTS, SAMPLING)
    with pytest.raises(ValueError, match="sibling 40 of p/0, which was not requested"):
        Watchdog(Confused(), timeout_s=60.0).generate(REQUESTS, SAMPLING)


def test_finished_is_called_once_per_rollout_as_it_finishes():
    """The fake engine delivers every rollout twice. "cut" rollouts are not finished."""
    engine = fakes.Engine(stall={("p/0", 3)}, lose={("p/1", 39)})
    reported, threads = [], set()

    def finished(request, rollout):
        reported.append((request, rollout.index, rollout))
        threads.add(threading.current_thread())

    result = Watchdog(engine, timeout_s=0.4).generate(REQUESTS, SAMPLING, finished)
    assert [(request, index) for request, index, _ in reported] == [
        *((0, i) for i in range(40) if i != 3),
        *((1, i) for i in range(32, 39)),
    ]
    complete = {(i, r.index): r for i, rollouts in enumerate(result.rollouts) for r in rollouts if r.finish != "cut"}
    assert all(complete.pop((request, index)) is rollout for request, index, rollout in reported)
    assert not complete
    assert threading.current_thread() not in threads  # the caller's thread waits


def test_rollouts_of_an_abandoned_engine_are_ignored():
    release, delivered = threading.Event(), threading.Event()
    reported = []

    class Late(fakes.Engine):
        def generate(self, requests, sampling, callbacks=None, supply=None):
            groups = super().generate(requests, sampling, callbacks)
            callbacks.finished(0, Rollout(3, torch.zeros(1), torch.zeros(1), "stop"))
            delivered.set()
            return groups

    dog = Watchdog(Late(stall={("p/0", 3)}, deaf=release), timeout_s=0.2, grace_s=0.2)
    result = dog.generate(REQUESTS, SAMPLING, lambda request, rollout: reported.append((request, rollout.index)))
    assert dog.stuck
    release.set()
    assert delivered.wait(60)
    assert (0, 3) not in reported
    assert len(reported) == sum(map(len, result.rollouts)) == 47


def test_exception_in_finished_cancels_the_call():
    """The engine stops normally and can be used again."""
    engine, reported = fakes.Engine(stall={("p/0", 3)}), []

    def finished(request, rollout):
        reported.append(rollout.index)
        if len(reported) == 5:
            raise UserError("no scoring process can be started")

    dog = Watchdog(engine, timeout_s=600.0)
    with pytest.raises(UserError, match="no scoring process can be started"):
        dog.generate(REQUESTS, SAMPLING, finished)
    assert reported == [0, 1, 2, 4, 5]  # no call after the exception
    assert not dog.stuck
    engine.stall = set()
    assert indices(dog.generate(REQUESTS, SAMPLING)) == [list(range(40)), list(range(32, 40))]
