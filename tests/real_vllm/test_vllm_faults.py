"""The real vLLM killed, frozen and out of memory: what was asked comes all the same, by whole weights."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest
from vllm_engines import draw, tokens

from megatron_brorl.errors import UserError


def processes_of(engine) -> list[psutil.Process]:
    """The engine's own process, then those that it started."""
    own = psutil.Process(engine.supervisor.pid)
    return [own, *own.children(recursive=True)]


def worker_of(engine) -> psutil.Process:
    """The process that holds the weights: the largest."""
    return max(processes_of(engine)[1:], key=lambda p: p.memory_info().rss)


def during(engine, seconds, act):
    """Call act in the midst of a generation of 512 siblings, and return them."""
    timer = threading.Timer(seconds, act)
    timer.start()
    found = draw(engine, 512)
    timer.join()
    return found


@pytest.fixture(scope="module")
def expected(shared):
    return tokens(draw(shared, 512))


@pytest.mark.parametrize("which", ["server", "worker"])
def test_killed_while_it_generates(which, model, expected, start, capfd):
    """SIGKILL, of the worker as the kernel does where memory runs out: the same 512 siblings."""
    engine = start(model)
    engine.update_weights(model.stream(), 0)
    victim = psutil.Process(engine.supervisor.pid) if which == "server" else worker_of(engine)
    found = during(engine, 0.3, victim.kill)
    assert engine.supervisor.pid != victim.pid
    assert tokens(found) == expected
    assert "starting it again with the weights of version 0" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_hurt_in_an_update(number, model, expected, start):
    """The update is sent once more, to a new process: it has these weights, and none of those before."""
    engine = start(model, config={"heartbeat_timeout_s": 5.0})
    ask, first = engine.supervisor._ask, engine.supervisor.pid

    def hurt_before_the_end(message):
        if message.kind == "finish" and engine.supervisor.pid == first:
            os.kill(first, number)
        ask(message)

    engine.supervisor._ask = hurt_before_the_end
    engine.update_weights(model.stream(), 0)
    assert engine.supervisor.pid != first
    assert tokens(draw(engine, 512)) == expected


def test_frozen(model, expected, start, capfd):
    """SIGSTOP: it is silent for too long, and started again."""
    engine = start(model, config={"heartbeat_timeout_s": 5.0})
    engine.update_weights(model.stream(), 0)
    pid = engine.supervisor.pid
    found = during(engine, 0.3, lambda: os.kill(pid, signal.SIGSTOP))
    assert engine.supervisor.pid != pid
    assert tokens(found) == expected
    assert "is silent for" in capfd.readouterr().err


def test_a_frozen_worker_is_given_up(model, start):
    """The server lives while its worker stands still: the caller's patience ends, nothing is lost, and the next call
    has a new engine."""

    class Patience:
        end = time.monotonic() + 1e9

        def finished(self, request, rollout):
            pass

        def cancelled(self):
            return time.monotonic() > self.end

    engine = start(model)
    engine.update_weights(model.stream(), 0)
    patience, pid, worker = Patience(), engine.supervisor.pid, worker_of(engine)
    patience.end = time.monotonic() + 3.0
    worker.suspend()
    found = draw(engine, 64, watch=patience)
    assert {r.finish for r in found} == {"cut"}
    assert engine.supervisor.pid != pid
    assert {r.finish for r in draw(engine, 64)} <= {"stop", "length"}


def test_nothing_is_left_behind_and_nothing_listens(model, start):
    engine = start(model)
    engine.update_weights(model.stream(), 0)
    draw(engine)
    found = processes_of(engine)
    listening = {c.laddr.ip for p in found for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert listening <= {"127.0.0.1"}
    engine.close()
    _, alive = psutil.wait_procs(found, timeout=20)
    assert not alive
    assert not engine.folder.exists()


def test_what_cannot_start_says_why(model, start):
    for config, options, message in (
        ({"quantization": "fp8"}, {}, "vllm.quantization = 'fp8' needs a GPU"),
        ({}, {"kv_bytes": 1 << 10}, "raise rollout.kv_cache_mib or lower rollout.max_tokens"),
    ):
        with pytest.raises(UserError, match=message):
            start(model, config=config, options=options)
