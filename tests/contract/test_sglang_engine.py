"""RemoteEngine on SGLang's contract double: process, messages, refit, sleep, seeds and failures, for real."""

from __future__ import annotations

import io
import json
import pickle
import sys
import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from contract.engines import DOUBLE, PROMPT, SAMPLING, Model, draw, handles, same

from megatron_brorl.errors import UserError
from megatron_brorl.ops.reference.sampling import sampling_log_probs
from megatron_brorl.rollout.engine import Request
from megatron_brorl.rollout.receive import UpdateRefused
from megatron_brorl.rollout.remote.cuda_ipc import IpcSender
from megatron_brorl.rollout.remote.sglang import extension

pytestmark = pytest.mark.slow  # every test starts processes that import torch


@pytest.fixture
def begin(start):
    """Starts SGLang engines."""
    return partial(start, engine="sglang")


def expected(model, rollout, sampling):
    """Log-probs of a rollout's tokens by transformers and the reference of cuts."""
    ids = torch.tensor([[*PROMPT.token_ids, *rollout.token_ids.tolist()]])
    with torch.no_grad():
        logits = model.module(ids).logits[0, len(PROMPT.token_ids) - 1 : -1]
    values = sampling_log_probs(logits, sampling.temperature, sampling.top_p, sampling.top_k)
    return values.gather(-1, rollout.token_ids[:, None])[:, 0]


def test_it_generates_sleeps_and_takes_weights(model, begin):
    engine = begin()
    c = engine.capabilities
    assert (c.engine, c.seeds, c.log_probs, c.keeps_cut) == ("SGLang 0.5.23", "request", "tempered", True)
    engine.update_weights(model.stream(), 3)
    first = draw(engine, 200)
    assert {r.finish for r in first} == {"stop", "length"}
    for rollout in first[:16]:
        assert rollout.finish == ("stop" if rollout.token_ids[-1] == 2 else "length")
        assert rollout.spans == ((3, len(rollout.token_ids)),)
        torch.testing.assert_close(rollout.log_probs, model.log_probs(rollout), atol=2e-5, rtol=0)

    # Whoever asks, and however: what is drawn depends on key and sibling alone.
    assert same([*draw(engine, 5), *draw(engine, 7, first=5)], first[:12])
    assert not same(draw(engine, 12, key=12), first[:12])

    # What is above 1 / top_k is renormalised; what cannot be had is refused.
    for sampling in (replace(SAMPLING, temperature=0.7), replace(SAMPLING, temperature=0.7, top_k=5, top_p=0.8)):
        for rollout in draw(engine, 8, sampling=sampling):
            torch.testing.assert_close(rollout.log_probs, expected(model, rollout, sampling), atol=5e-5, rtol=0)
    with pytest.raises(UserError, match="reports log-probs before top-p"):
        draw(engine, sampling=replace(SAMPLING, top_p=0.9))
    greedy = draw(engine, 3, sampling=replace(SAMPLING, temperature=0.0))
    assert len({tuple(r.token_ids.tolist()) for r in greedy}) == 1

    # Weights and caches are lost in a sleep; an update wakes it.
    engine.sleep()
    engine.update_weights(model.stream(0.5), 4)
    assert not same(draw(engine), first[:16])
    engine.sleep()
    engine.wake()
    engine.update_weights(model.stream(), 3)
    assert same(draw(engine, 200), first)


def test_budget_and_continuation(model, begin):
    """Four tokens at a time, under three versions of the weights; a response may fill the context to its last token."""
    whole = 12 + len(PROMPT.token_ids)
    engine = begin(options={"context": whole, "stop_ids": (2,)})
    siblings = {}
    for version in range(3):
        engine.update_weights(model.stream(1 + version / 10), version)
        begun = [r for r in siblings.values() if r.finish == "cut"]
        requests = [Request(PROMPT, 11, 20)] if not version else [Request(PROMPT, 11, 1, r.index, (r,)) for r in begun]
        for group in engine.generate(requests, replace(SAMPLING, budget=4)):
            for rollout in group:
                before = siblings.get(rollout.index)
                if before is not None:
                    assert torch.equal(rollout.token_ids[: len(before.token_ids)], before.token_ids)
                siblings[rollout.index] = rollout
    assert {r.finish for r in siblings.values()} == {"stop", "length"}
    longest = max(siblings.values(), key=lambda r: len(r.token_ids))
    assert longest.spans == ((0, 4), (1, 4), (2, 4))
    assert len(longest.log_probs) == 12


class Impatient:
    """Stops when the first rollout has ended."""

    def __init__(self):
        self.seen = threading.Event()

    def finished(self, request, rollout):
        self.seen.set()

    def cancelled(self):
        return self.seen.is_set()


def test_cancelled_rollouts_keep_their_tokens(model, begin):
    engine = begin(options={"max_rows": 4})  # few at a time, so that most are unfinished
    engine.update_weights(model.stream(), 0)
    whole = draw(engine, 400)
    group = draw(engine, 400, watch=Impatient())
    assert len(group) == 400
    cut = [r for r in group if r.finish == "cut"]
    assert 0 < len(cut) < 400
    for rollout in cut:  # what there is of it is what it would have been
        assert torch.equal(rollout.token_ids, whole[rollout.index].token_ids[: len(rollout.token_ids)])
    assert same(draw(engine), whole[:16])


def test_damage_in_shared_memory_is_told_by_the_worker(model, begin):
    """Every start is sent the damaged file; the last word is the worker's, not that of a dead process."""
    engine = begin(config={"max_restarts": 1})
    engine.update_weights(model.stream(), 0)
    stage = engine._stage

    def spoiled(tensors, version):
        weights = stage(tensors, version)
        with open(weights.path, "r+b") as file:
            file.seek(weights.records[7].offset + 5)
            file.write(b"\x55")
        return weights

    engine._stage = spoiled
    with pytest.raises(UpdateRefused, match=r"is not what was sent \(checksum\)"):
        engine.update_weights(model.stream(0.5), 1)
    with pytest.raises(UserError, match="given up"):
        draw(engine)


@pytest.mark.parametrize("point", ["row:9", "load:1", "end:1", "sleep:1"])
def test_killed(point, model, begin, monkeypatch, tmp_path, capfd):
    """SIGKILL after nine rows, before loading weights, before they are complete, and on the way to sleep."""
    flag = tmp_path / "died"
    monkeypatch.setenv("BRORL_DOUBLE_DIE", f"{point}:{flag}")
    flag.touch()  # not yet
    engine = begin()
    engine.update_weights(model.stream(), 0)
    before = draw(engine, 20)
    flag.unlink()
    if point == "sleep:1":
        engine.sleep()
        engine.wake()
    else:
        assert point == "row:9" or not flag.exists()
    engine.update_weights(model.stream(), 1)
    again = draw(engine, 20)
    assert flag.exists()
    assert [r.token_ids.tolist() for r in again] == [r.token_ids.tolist() for r in before]
    assert "starting it again" in capfd.readouterr().err


@pytest.mark.parametrize("point", ["load", "end", "sleep"])
def test_a_worker_that_stands_still_in_a_refit(point, model, begin, monkeypatch, tmp_path, capfd):
    """The process in front of it answers and beats on; the call ends all the same, and a new engine has the weights."""
    flag = tmp_path / "stopped"
    monkeypatch.setenv("BRORL_DOUBLE_HANG", f"{point}:1:{flag}")
    flag.touch()  # not yet
    engine = begin(config={"heartbeat_timeout_s": 5.0})
    engine.update_weights(model.stream(), 0)
    expected, pid = draw(engine, 20), engine.supervisor.pid
    flag.unlink()
    engine.sleep()
    assert flag.exists() == (point == "sleep")
    engine.update_weights(model.stream(), 1)
    assert flag.exists()
    assert engine.supervisor.pid != pid
    assert [r.token_ids.tolist() for r in draw(engine, 20)] == [r.token_ids.tolist() for r in expected]
    part = "finish" if point == "end" else point
    assert f"has not done '{part}' after 5 s (engine.heartbeat_timeout_s)" in capfd.readouterr().err


@pytest.mark.parametrize("readable", [True, False])
def test_cuda_ipc_path_with_a_stand_in_for_the_handles(readable, model, begin, monkeypatch):
    """Tensors are pickled whole where CUDA would pickle handles; where the engine cannot read them, everything is sent
    again by host memory, without a restart."""
    engine = begin()
    engine.update_weights(model.stream(0.5), 0)
    sent = []

    def reduced(tensor):
        sent.append(tensor)
        return handles(tensor if readable else tensor + 1)

    sender = partial(IpcSender, limit=30_000, reduce=reduced)
    monkeypatch.setattr("megatron_brorl.rollout.remote.engine.IpcSender", sender)
    engine.ipc, pid = True, engine.supervisor.pid
    engine.update_weights(model.stream(), 1)
    assert (len(sent) == len(engine.names)) == readable
    assert engine.supervisor.pid == pid
    for rollout in draw(engine):
        torch.testing.assert_close(rollout.log_probs, model.log_probs(rollout), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        ({"BRORL_DOUBLE_SEEDS": "0"}, {}, "SGLang 0.5.23 takes no seed per request"),
        ({}, {"stop_ids": (3,)}, "SGLang stops at token 2, an eos_token_id of"),
        ({"BRORL_DOUBLE_KV_TOKENS": "207"}, {}, "keys and values of 207 tokens fit, and one response .* may take 200"),
    ],
)
def test_what_cannot_start_says_why(environment, options, message, model, begin, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message) as caught:
        begin(options=options)
    assert "\n" not in str(caught.value)


def test_a_parameter_that_was_not_filled_is_told(tmp_path):
    """A head that is a parameter of its own here and is not among the names: complete by the list, and stale."""
    module = torch.nn.ModuleDict({"body": torch.nn.Linear(2, 3), "head": torch.nn.Linear(3, 2, bias=False)})
    module.load_weights = lambda pairs: module.load_state_dict(dict(pairs), strict=False)

    def tell(**message):
        text = json.dumps({**message, "answers": str(tmp_path)}).encode()
        extension.update(module, [("message", torch.frombuffer(bytearray(text), dtype=torch.uint8))])
        (answer,) = tmp_path.iterdir()
        return answer.read_text()

    assert tell(kind="begin") == ""
    names = ["body.weight", "body.bias"]
    extension._reader.seen |= set(names)
    assert "1 tensors missing or unknown, for example body.bias" in tell(kind="finish", names=names[:1])
    module.load_weights([(name, torch.ones_like(module.get_parameter(name))) for name in names])
    wrong = "ValueError: 1 parameters of the engine were not filled or are NaN, for example "
    assert tell(kind="finish", names=names) == wrong + "head.weight"

    # A part of one that SGLang joins, or a NaN that was sent.
    module["head"].weight.data.fill_(1.0)
    assert tell(kind="finish", names=names) == ""
    module["body"].weight.data[0, 1] = torch.nan
    assert tell(kind="finish", names=names) == wrong + "body.weight"


@pytest.fixture
def sglang(monkeypatch):
    """The double, importable here."""
    monkeypatch.syspath_prepend(str(DOUBLE))
    yield
    for name in [m for m in sys.modules if m.partition(".")[0] in ("sglang", "dying")]:
        del sys.modules[name]


def test_the_double_is_as_strict_as_the_engine(sglang, model: Model):
    """What SGLang refuses, the double refuses; an abort's id is a prefix there too."""
    from sglang._engine import TokenizerManager
    from sglang._scheduler import Row, SafeUnpickler
    from sglang._settings import SamplingParams, ServerArgs
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, UpdateWeightsFromTensorReqInput

    path = str(model.directory)
    for wrong in ({"max_model_len": 4}, {"context_length": "4k"}, {"custom_weight_loader": "a.b"}, {"tp_size": True}):
        with pytest.raises(TypeError):
            ServerArgs(model_path=path, **wrong)
    with pytest.raises(ValueError, match="kv_cache_dtype"):
        ServerArgs(model_path=path, kv_cache_dtype="fp8")
    for wrong in ({"max_tokens": 4}, {"seed": 3}, {"top_k": 2.0}, {"stop_token_ids": 2}):
        with pytest.raises(TypeError):
            SamplingParams(**wrong)
    for wrong in ({"top_k": 0}, {"top_p": 0.0}, {"sampling_seed": 2**63}, {"stop": "x"}, {"temperature": -1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong)) if "stop" not in wrong else "skip_tokenizer_init"):
            SamplingParams(**wrong).verify()
    with pytest.raises(TypeError):
        UpdateWeightsFromTensorReqInput(serialized_named_tensors=["text"])
    with pytest.raises(TypeError):
        BeginWeightUpdateReqInput("all")
    with pytest.raises(RuntimeError, match="Blocked unsafe global"):
        SafeUnpickler(io.BytesIO(pickle.dumps(DOUBLE))).load()

    manager = TokenizerManager(ServerArgs(model_path=path), None)
    rows = {rid: Row(rid, [1], SamplingParams(), False, 0, lambda: None) for rid in ("1", "12", "2")}
    manager.rid_to_state.update(rows)
    manager.abort_request(rid="1")
    assert {rid for rid, row in rows.items() if row.aborted} == {"1", "12"}
