"""Tests that kill and freeze the real vLLM. The results must not change."""

from __future__ import annotations

import os
import signal
import tempfile
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from vllm_engines import Model, draw, make_engine, tokens

from megatron_brorl.errors import UserError


def processes_of(engine) -> list[psutil.Process]:
    """Return the engine's process and all its descendants."""
    server = psutil.Process(engine.supervisor.pid)
    return [server, *server.children(recursive=True)]


def worker_of(engine) -> psutil.Process:
    """Return the process that holds the weights, the last of vLLM's processes."""
    return [p for p in processes_of(engine) if "VLLM" in "".join(p.cmdline())][-1]


def shared_memory_of(processes) -> set[Path]:
    """Return the files in /dev/shm, outside the engine's folder, that these processes have mapped."""
    maps = [m.path for p in processes for m in p.memory_maps()]
    return {Path(path) for path in maps if Path(path).parent == Path("/dev/shm")}


@contextmanager
def nothing_left_of(engine):
    """Check that the engine's current processes and their shared memory are gone at the end."""
    processes = processes_of(engine)
    memory = shared_memory_of(processes)
    assert len(processes) > 2
    assert memory  # vLLM's queues between core and worker
    yield
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive
    assert not [path for path in memory if path.exists()]


@pytest.fixture(scope="module")
def hurt(tmp_path_factory):
    """Yield a model and an engine for tests that change the weights and restart the engine."""
    model = Model(tmp_path_factory.mktemp("changing"), "qwen2", tied=True)
    engine = make_engine(model, tmp_path_factory.mktemp("hurt") / "log")
    engine.update_weights(model.stream(), version=0)
    yield model, engine
    engine.close()


def victim_in(engine, which) -> psutil.Process:
    return psutil.Process(engine.supervisor.pid) if which == "server" else worker_of(engine)


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize("which", ["server", "worker"])
def test_fault_in_generate(which, signal_number, hurt, monkeypatch, capfd):
    """A new process samples the same 512 siblings. Killing the worker imitates the kernel's OOM killer."""
    _, engine = hurt
    expected, first_pid = tokens(draw(engine, n=512)), engine.supervisor.pid
    ask, victim = engine._ask, victim_in(engine, which)

    def ask_and_hurt(rows, sampling):
        if engine.supervisor.pid == first_pid:
            victim.suspend()  # It could otherwise answer before the signal.
        pid = ask(rows, sampling)
        if pid == first_pid:
            victim.send_signal(signal_number)
        return pid

    monkeypatch.setattr(engine, "_ask", ask_and_hurt)
    with nothing_left_of(engine):
        rollouts = draw(engine, n=512)
        assert engine.supervisor.pid != first_pid
    assert tokens(rollouts) == expected
    errors = capfd.readouterr().err
    assert f"restarting it with the weights of version {engine.version}" in errors
    assert ("silent for" if signal_number == signal.SIGSTOP else "ended (") in errors


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize(
    ("which", "point"), [("server", "load"), ("server", "finish"), ("worker", "load"), ("worker", "finish")]
)
def test_fault_in_weight_sync(which, point, signal_number, hurt, monkeypatch):
    """The new process has all of the new weights."""
    model, engine = hurt
    ask, first_pid, version = engine.supervisor._ask, engine.supervisor.pid, engine.version + 1
    victim = victim_in(engine, which)

    def hurt_before(message):
        if message.kind == point and engine.supervisor.pid == first_pid:
            victim.send_signal(signal_number)
        ask(message)

    monkeypatch.setattr(engine.supervisor, "_ask", hurt_before)
    model.change(version, std=0.02)
    with nothing_left_of(engine):
        engine.update_weights(model.stream(), version)
        assert engine.supervisor.pid != first_pid
    rollouts = draw(engine, n=512)
    assert {r.finish for r in rollouts} == {"stop", "length"}
    assert all(r.spans == ((version, len(r.token_ids)),) for r in rollouts)
    assert model.gap(rollouts[:64]) < 1e-4


@pytest.mark.parametrize("end", ["closed", "deserted"])
def test_engine_leaves_nothing_behind_and_listens_only_on_loopback(end, model, start):
    names_before = set(os.listdir(tempfile.gettempdir()))
    engine = start(model)
    engine.update_weights(model.stream(), version=0)
    draw(engine)
    processes = processes_of(engine)
    listening = {c.laddr.ip for p in processes for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert listening <= {"127.0.0.1"}
    with nothing_left_of(engine):
        if end == "deserted":
            engine.supervisor._closing.set()  # The supervisor then does not restart the engine.
            engine.supervisor._process._process.stdin.close()
            psutil.wait_procs(processes[:1], timeout=20)
        else:
            engine.close()
    assert not engine.folder.exists()
    assert not [name for name in set(os.listdir(tempfile.gettempdir())) - names_before if "vllm" in name]


def test_failed_start_is_reported(model, start):
    for config, options, message in (
        ({"quantization": "fp8"}, {}, "engine.quantization = 'fp8' needs a GPU"),
        ({}, {"kv_bytes": 1 << 10}, "raise rollout.kv_cache_mib or lower rollout.max_tokens"),
    ):
        with pytest.raises(UserError, match=message):
            start(model, config=config, options=options)
