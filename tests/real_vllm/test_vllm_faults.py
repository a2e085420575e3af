"""The real vLLM killed, frozen and out of memory: what was asked comes all the same, by whole weights."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from vllm_engines import PYTHON, Model, draw, make_engine, tokens

from megatron_brorl.errors import UserError


def processes_of(engine) -> list[psutil.Process]:
    """The engine's own process, then those that it started."""
    own = psutil.Process(engine.supervisor.pid)
    return [own, *own.children(recursive=True)]


def worker_of(engine) -> psutil.Process:
    """The process that holds the weights: the last of the line of children that are vLLM's."""
    return [p for p in processes_of(engine) if "VLLM" in "".join(p.cmdline())][-1]


def shared_memory_of(processes) -> set[Path]:
    """What they have mapped of it outside the engine's folder."""
    maps = [m.path for p in processes for m in p.memory_maps()]
    return {Path(path) for path in maps if Path(path).parent == Path("/dev/shm")}


@contextmanager
def nothing_left_of(engine):
    """What the engine has at the beginning is gone after the end: processes, and memory that they shared."""
    processes = processes_of(engine)
    memory = shared_memory_of(processes)
    assert len(processes) > 2
    assert memory  # vLLM's queues between core and worker
    yield
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive
    assert not [path for path in memory if path.exists()]


def during(engine, seconds, act):
    """Call act in the midst of a generation of 512 siblings, and return them."""
    timer = threading.Timer(seconds, act)
    timer.start()
    found = draw(engine, 512)
    timer.join()
    return found


@pytest.fixture(scope="module")
def hurt(tmp_path_factory):
    """A model that changes and an engine that every fault leaves with a new process."""
    model = Model(tmp_path_factory.mktemp("changing"), "qwen2", tied=True)
    config = {"heartbeat_timeout_s": 5.0}
    engine = make_engine(model, tmp_path_factory.mktemp("hurt") / "log", PYTHON, config=config)
    engine.update_weights(model.stream(), 0)
    yield model, engine
    engine.close()


def victim_in(engine, which) -> psutil.Process:
    return psutil.Process(engine.supervisor.pid) if which == "server" else worker_of(engine)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize("which", ["server", "worker"])
def test_hurt_while_it_generates(which, number, hurt, capfd):
    """The same 512 siblings come, of a new process. The worker is killed as the kernel does where memory runs out."""
    _, engine = hurt
    expected, first = tokens(draw(engine, 512)), engine.supervisor.pid
    victim = victim_in(engine, which)
    with nothing_left_of(engine):
        found = during(engine, 0.3, lambda: victim.send_signal(number))
        assert engine.supervisor.pid != first
    assert tokens(found) == expected
    said = capfd.readouterr().err
    assert f"starting it again with the weights of version {engine.version}" in said
    assert "silent for" in said if number == signal.SIGSTOP else "ended (" in said


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize(
    ("which", "point"), [("server", "load"), ("server", "finish"), ("worker", "load"), ("worker", "finish")]
)
def test_hurt_in_a_refit(which, point, number, hurt, monkeypatch):
    """After `begin`, with weights in use: the new process has all of the new ones and none of those before."""
    model, engine = hurt
    ask, first, version = engine.supervisor._ask, engine.supervisor.pid, engine.version + 1
    victim = victim_in(engine, which)

    def hurt_before(message):
        if message.kind == point and engine.supervisor.pid == first:
            victim.send_signal(number)
        ask(message)

    monkeypatch.setattr(engine.supervisor, "_ask", hurt_before)
    model.change(version, std=0.02)
    with nothing_left_of(engine):
        engine.update_weights(model.stream(), version)
        assert engine.supervisor.pid != first
    found = draw(engine, 512)
    assert {r.finish for r in found} == {"stop", "length"}
    assert all(r.spans == ((version, len(r.token_ids)),) for r in found)
    assert model.gap(found[:64]) < 1e-4
    assert [path.name for path in engine.folder.glob("weights_*")] == [engine.supervisor.weights.path.name]


def test_a_frozen_worker_is_given_up(model, start):
    """The server lives while its worker stands still: the caller's patience ends, nothing is lost, and the next call
    is answered by a new engine, whether this call's end or the watch on vLLM's core has noticed."""

    class Patience:
        end = time.monotonic() + 1e9

        def finished(self, request, rollout):
            pass

        def cancelled(self):
            return time.monotonic() > self.end

    engine = start(model, config={"heartbeat_timeout_s": 5.0})
    engine.update_weights(model.stream(), 0)
    patience, pid, worker = Patience(), engine.supervisor.pid, worker_of(engine)
    patience.end = time.monotonic() + 3.0
    worker.suspend()
    found = draw(engine, 64, callbacks=patience)
    assert {r.finish for r in found} == {"cut"}
    assert {r.finish for r in draw(engine, 64)} <= {"stop", "length"}
    assert engine.supervisor.pid != pid


@pytest.mark.parametrize("end", ["closed", "deserted"])
def test_nothing_is_left_behind_and_nothing_listens(end, model, start):
    """Whether the engine is closed or the process that started it is gone."""
    others = set(os.listdir(tempfile.gettempdir()))
    engine = start(model)
    engine.update_weights(model.stream(), 0)
    draw(engine)
    found = processes_of(engine)
    listening = {c.laddr.ip for p in found for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert listening <= {"127.0.0.1"}
    with nothing_left_of(engine):
        if end == "deserted":
            engine.supervisor._closing.set()  # or it would start another
            engine.supervisor._process._process.stdin.close()
            psutil.wait_procs(found[:1], timeout=20)
        else:
            engine.close()
    assert not engine.folder.exists()
    assert not [name for name in set(os.listdir(tempfile.gettempdir())) - others if "vllm" in name]


def test_what_cannot_start_says_why(model, start):
    for config, options, message in (
        ({"quantization": "fp8"}, {}, "engine.quantization = 'fp8' needs a GPU"),
        ({}, {"kv_bytes": 1 << 10}, "raise rollout.kv_cache_mib or lower rollout.max_tokens"),
    ):
        with pytest.raises(UserError, match=message):
            start(model, config=config, options=options)
