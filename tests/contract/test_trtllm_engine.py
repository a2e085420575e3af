"""Tests of RemoteEngine with real processes and the fake tensorrt_llm."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from contract.double.fp8_blocks import dequantize
from contract.engines import SAMPLING, damage_staged_weights, draw, same
from forks import until

from megatron_brorl.errors import UserError
from megatron_brorl.ops.checksum import ChecksummedTensor
from megatron_brorl.ops.reference.sampling import sampling_log_probs
from megatron_brorl.rollout.remote import process, remote_engine
from megatron_brorl.rollout.remote.weights_in_trainer import quantize
from megatron_brorl.rollout.weight_stream import UpdateRefused

pytestmark = pytest.mark.slow  # every test starts processes that import torch


def has_members(group):
    """Return whether the process group has a process left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_generate_sleep_and_weight_sync(model, start):
    engine = start()
    assert engine.capabilities.engine == "TensorRT-LLM 1.3.0rc29"
    with pytest.raises(RuntimeError, match="no weights"):
        draw(engine)
    engine.update_weights(model.stream(), version=3)
    expected = draw(engine)
    assert [r.index for r in expected] == list(range(16))
    for rollout in expected:
        assert rollout.finish == ("stop" if rollout.token_ids[-1] == 2 else "length")
        assert rollout.spans == ((3, len(rollout.token_ids)),)
        torch.testing.assert_close(rollout.log_probs, model.log_probs(rollout), atol=2e-5, rtol=0)
    assert {r.finish for r in draw(engine, n=200)} == {"stop", "length"}
    engine.sleep()
    engine.wake()
    with pytest.raises(RuntimeError, match="no weights"):
        draw(engine)
    engine.update_weights(model.stream(), version=3)
    assert same(draw(engine), expected)
    assert [path.name for path in engine.folder.glob("weights_*")] == ["weights_0"]  # overwritten
    engine.update_weights(model.stream(scale=0.5), version=4)
    from_other_weights = draw(engine)
    assert {version for r in from_other_weights for version, _ in r.spans} == {4}
    assert not same(from_other_weights, expected)
    engine.sleep()
    engine.update_weights(model.stream(), version=5)  # an update wakes the engine
    assert same(draw(engine), expected)


def test_log_probs_are_of_the_sampling_distribution(model, start):
    """Log-probabilities include temperature, top-k and top-p, and are NaN if they are not requested."""
    engine = start()
    engine.update_weights(model.stream(), version=0)
    warm, nucleus = replace(SAMPLING, temperature=0.7), replace(SAMPLING, temperature=0.6, top_p=0.95)
    for sampling in (warm, replace(warm, top_k=5, top_p=0.8), nucleus):
        for rollout in draw(engine, n=8, sampling=sampling):
            expected = sampling_log_probs(model.logits(rollout), sampling.temperature, sampling.top_p, sampling.top_k)
            expected = expected.gather(-1, rollout.token_ids[:, None])[:, 0]
            torch.testing.assert_close(rollout.log_probs, expected, atol=5e-5, rtol=0)
    unasked = draw(engine, sampling=replace(nucleus, log_probs=False))
    assert all(bool(r.log_probs.isnan().all()) for r in unasked)
    greedy = draw(engine, n=3, sampling=replace(SAMPLING, temperature=0.0))
    assert len({tuple(r.token_ids.tolist()) for r in greedy}) == 1


@pytest.mark.parametrize("when", ["asleep", "falling asleep"])
def test_engine_killed_in_its_sleep_restarts_at_wake(when, model, start, monkeypatch, tmp_path, capfd):
    """The engine must not restart during its sleep, because the trainer uses the GPU's memory."""
    flag = tmp_path / "died"
    if when == "falling asleep":
        monkeypatch.setenv("BRORL_DOUBLE_DIE", f"sleep:1:{flag}")
    engine = start()
    engine.update_weights(model.stream(), version=0)
    expected = draw(engine)
    pid = engine.supervisor.pid
    engine.sleep()
    if when == "asleep":
        os.kill(pid, signal.SIGKILL)
    time.sleep(1)
    assert engine.supervisor.pid == pid
    engine.wake()
    assert engine.supervisor.pid != pid
    engine.update_weights(model.stream(), version=1)
    assert same(draw(engine), expected)
    assert "restarting it without weights" in capfd.readouterr().err


def test_results_after_a_kill_equal_undisturbed_ones(model, start, monkeypatch, tmp_path, capfd):
    """Kill the engine after nine rollouts, before loading weights, and between loading and finishing."""
    undisturbed = start()
    undisturbed.update_weights(model.stream(), version=0)
    undisturbed.update_weights(model.stream(scale=0.9), version=1)
    expected = draw(undisturbed, n=40)
    flag = tmp_path / "died"
    for point in ("row:9", "load:1", "finish:1"):
        monkeypatch.setenv("BRORL_DOUBLE_DIE", f"{point}:{flag}")
        flag.touch()  # disables the kill during the first update
        engine = start()
        engine.update_weights(model.stream(), version=0)
        flag.unlink()
        engine.update_weights(model.stream(scale=0.9), version=1)
        assert engine.version == 1
        assert same(draw(engine, n=40), expected)
        assert flag.exists()
        assert "ended (SIGKILL)" in capfd.readouterr().err
        assert {path.name for path in engine.folder.glob("weights_*")} == {"weights_0", "weights_1"}


def test_too_many_restarts_end_the_run(model, start, monkeypatch):
    monkeypatch.setattr(process, "MAX_RESTARTS", 2)
    engine = start()
    engine.update_weights(model.stream(), version=0)
    supervisor = engine.supervisor
    for _ in range(3):
        pid = supervisor.pid
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: supervisor.pid != pid or supervisor.failure)
    with pytest.raises(UserError, match=r"gave up after 2 restarts"):
        draw(engine)


def test_hanging_process_is_restarted(model, start, monkeypatch, capfd):
    monkeypatch.setattr(process, "HEARTBEAT_TIMEOUT_S", 5.0)
    engine = start()
    engine.update_weights(model.stream(), version=0)
    expected = draw(engine)
    os.kill(engine.supervisor.pid, signal.SIGSTOP)
    assert same(draw(engine), expected)
    assert "is silent for" in capfd.readouterr().err


def test_an_engine_that_does_not_cancel_is_started_again_after_the_call(model, start, monkeypatch):
    """The call returns while the new process still starts."""
    engine = start()
    engine.update_weights(model.stream(), version=0)
    expected = draw(engine)
    monkeypatch.setattr(remote_engine, "_STOP_S", 0.2)
    may_start = threading.Event()
    begin = engine.supervisor._start
    monkeypatch.setattr(engine.supervisor, "_start", lambda: begin() if may_start.wait(600) else None)
    os.kill(engine.supervisor.pid, signal.SIGSTOP)
    is_cancelled = iter([False, True])  # when the call begins, and after its requests were sent
    callbacks = SimpleNamespace(cancelled=lambda: next(is_cancelled, True), finished=lambda *_: None)
    assert {rollout.finish for rollout in draw(engine, callbacks=callbacks)} == {"cut"}
    may_start.set()
    assert same(draw(engine), expected)


def test_two_ranks_share_an_engine(model, start):
    leader = start(config={"tensor": 2})
    other = start(config={"tensor": 2}, leader=leader)
    for version in range(2):
        leader.update_weights(model.stream(1 + version), version)
        other.update_weights(model.stream(1 + version), version)
        with ThreadPoolExecutor(2) as threads:
            halves = [threads.submit(draw, engine, n=10, first=i) for engine, i in ((leader, 0), (other, 10))]
            if version:
                os.kill(leader.supervisor.pid, signal.SIGKILL)
            siblings = [rollout for half in halves for rollout in half.result(120)]
        assert same(draw(leader, n=20), siblings)
        assert len({tuple(r.token_ids.tolist()) for r in siblings if len(r.token_ids) == 12}) > 3


def test_a_process_that_does_not_answer_is_a_one_line_error(start, monkeypatch, tmp_path):
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec sleep 600\n")
    silent.chmod(0o755)
    monkeypatch.setattr(process, "START_TIMEOUT_S", 0.3)
    with pytest.raises(UserError, match=r"did not answer within 0\.3 s; see"):
        start(config={"python": str(silent)})


@pytest.mark.parametrize(
    ("config", "environment", "message"),
    [
        ({"python": "/nowhere/python"}, {}, r"engine\.python = /nowhere/python: No such file or directory"),
        ({"shared_memory": "/nowhere"}, {}, r"engine\.shared_memory = /nowhere: cannot be written"),
        ({}, {"BRORL_DOUBLE_VERSION": "1.3.0rc21"}, r"TensorRT-LLM 1\.3\.0rc21 .*: install 1\.3\.0rc29 or newer$"),
        ({}, {"PYTHONPATH": ""}, "No module named 'tensorrt_llm'"),
    ],
)
def test_failed_start_is_a_one_line_error(config, environment, message, start, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message) as error:
        start(config=config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("tokens", "planned", "rows"), [("6400", 0, 32), ("6400", 1000, 4), ("6400000", 0, 600)])
def test_batch_size_is_limited_by_the_cache(tokens, planned, rows, model, start, monkeypatch):
    """The cache has blocks of 32 tokens, and the scheduler reserves 200 tokens per rollout. 600 is max_rows."""
    monkeypatch.setenv("BRORL_DOUBLE_KV_TOKENS", tokens)
    capabilities = start(config={"cuda_graphs": True}, options={"max_kv_tokens": planned}).capabilities
    assert capabilities.kv_tokens == (planned or int(tokens)) // 32 * 32
    assert capabilities.rows == rows


def test_close_leaves_no_processes_and_files(model, start, fresh):
    """This includes the process that crashed before, whose Ray keeps running."""
    engine = start()
    engine.update_weights(model.stream(), version=0)
    crashed = engine.supervisor.pid
    os.killpg(crashed, 0)
    os.kill(crashed, signal.SIGKILL)
    until(lambda: engine.supervisor.pid != crashed)
    pids = [crashed, engine.supervisor.pid]
    engine.close()
    assert not engine.folder.exists()
    for pid in pids:
        assert not os.path.exists(f"/proc/{pid}")
        until(lambda pid=pid: not has_members(pid))


def test_faulty_update_leaves_the_engine_unchanged(model, start):
    engine = start()
    engine.update_weights(model.stream(), version=0)
    before = draw(engine)
    pid = engine.supervisor.pid
    missing, damaged = list(model.stream())[:-1], list(model.stream())
    name, tensor = damaged[3]
    damaged[3] = ChecksummedTensor(name, tensor.clone().fill_(1.0), damaged[3].checksum)
    for pairs in (missing, damaged):
        with pytest.raises(UpdateRefused):
            engine.update_weights(pairs, version=1)
        assert engine.version == 0
        assert same(draw(engine), before)
        assert engine.supervisor.pid == pid


def test_worker_detects_damage_in_shared_memory(model, start, monkeypatch):
    """The file changes after the trainer's check. The engine never generates with the damaged weights."""
    monkeypatch.setattr(process, "MAX_RESTARTS", 1)
    engine = start()
    engine.update_weights(model.stream(), version=0)
    damage_staged_weights(engine)
    with pytest.raises(UpdateRefused, match=r"does not match its checksum"):
        engine.update_weights(model.stream(scale=0.5), version=1)
    with pytest.raises(UserError, match="gave up"):
        draw(engine)


def test_fp8_weights_equal_the_quantized_model(model, start):
    engine = start(config={"quantization": "fp8", "cuda_graphs": True})
    engine.update_weights(model.stream(), version=0)
    rollouts = draw(engine)
    exact = {n: p.detach().clone() for n, p in model.module.named_parameters()}
    try:
        for name, p in model.module.named_parameters():
            if name.endswith("_proj.weight"):
                p.data = dequantize(*quantize(p.data))
        for rollout in rollouts:
            torch.testing.assert_close(rollout.log_probs, model.log_probs(rollout), atol=2e-5, rtol=0)
    finally:
        model.module.load_state_dict(exact, strict=False)
    assert any(not torch.allclose(r.log_probs, model.log_probs(r), atol=1e-3) for r in rollouts)
