"""Run the examples of docs/extending.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType

import pytest
import tiny
import torch
from transformers import MistralConfig, MistralForCausalLM
from unit.api.test_train_api import even, tables  # noqa: F401  (a fixture)
from unit.rollout.remote.test_remote_engine import ask, served

from megatron_brorl import UserError, score, train
from megatron_brorl.config.schema import EngineConfig
from megatron_brorl.families import shape as shapes
from megatron_brorl.models.weights.names import hf_shapes
from megatron_brorl.ops.backend import backend
from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.rollout.native.torch_engine import TorchEngine
from megatron_brorl.rollout.remote.process import Connection, address
from megatron_brorl.rollout.remote.protocol import EngineOptions, Message
from megatron_brorl.rollout.remote.remote_engine import RemoteEngine
from megatron_brorl.rollout.remote.weights_in_trainer import NodeRanks, WeightUpdate, unchanged, write_update
from megatron_brorl.train.worker import StageOptions, Worker
from megatron_brorl.types import Prompt

PAGE = Path(__file__).parents[3] / "docs" / "extending.md"
CODE = re.findall(r"^```python\n# (\S+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
CPU = torch.device("cpu")


def source(file: str) -> str:
    """Return the blocks of a file."""
    return "\n".join(code for name, code in CODE if name == file)


def module(file: str) -> ModuleType:
    example = ModuleType("example")
    exec(compile(source(file), file, "exec"), example.__dict__)
    return example


def test_the_verifier(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(source("my_rewards.py"))
    rows = [{"answer": "4", "metadata": {"words": 3}}] * 4
    rewards = score(["it is 4", "so the sum is 4", "5", ""], rows, "my_rewards.py:score")
    assert [r.reward for r in rewards] == [1.0, 0.9, 0.1, 0.1]


def test_the_advantage_and_the_loss(tables, tmp_path, monkeypatch):  # noqa: F811
    """MaxRL and GSPO in a file, or as functions of the program, take the same steps as the built-in ones."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_algo.py").write_text(source("my_algo.py"))
    functions = module("my_algo.py")
    shared = ["reward.strict=true", "algo.mini_batches=2"]

    def run(name, *overrides, **options):
        return train(tables, overrides=[f"run.dir={name}", *shared, *overrides], reward=even, **options)

    expected = run("built_in", "algo.advantage=maxrl", "algo.ratio=sequence")
    in_file = run("in_file", "algo.advantage=my_algo.py:maxrl", "algo.policy_loss=my_algo.py:gspo")
    passed = run("passed", advantage=functions.maxrl, policy_loss=functions.gspo)
    assert expected.metrics[1]["grad_norm"] > 0
    names = ("loss", "grad_norm", "entropy", "reward", "trained_tokens")
    for result in (in_file, passed):
        for a, b in zip(result.metrics, expected.metrics, strict=True):
            assert [a[name] for name in names] == pytest.approx([b[name] for name in names], rel=1e-5)

    (tmp_path / "my_algo.py").write_text(source("my_algo.py") + "# a comment\n")
    with pytest.raises(UserError, match=r"was written with another version of my_algo\.py:maxrl \(sha256 "):
        run("in_file", "algo.advantage=my_algo.py:maxrl", "algo.policy_loss=my_algo.py:gspo")
    with pytest.raises(UserError, match="was written with another version of this_process:policy_loss"):
        run("passed", advantage=functions.maxrl, policy_loss=lambda log_probs, **_: -log_probs)
    with pytest.raises(UserError, match=r"^algo\.policy_loss: returned a loss without gradient"):
        run("passed", advantage=functions.maxrl, policy_loss=lambda advantages, **_: -advantages)


def test_the_model_family(processes, tmp_path, monkeypatch):
    """Compare the log-probabilities of actor and built-in engine with those of transformers."""
    family = module("megatron_brorl/families/mistral.py").FAMILY
    monkeypatch.setitem(shapes.FAMILIES, family.architecture, family)
    monkeypatch.setitem(shapes._BY_NAME, family.name, family)
    hf_family = tiny.Family(MistralConfig, MistralForCausalLM, {"sliding_window": None})
    monkeypatch.setitem(tiny.FAMILIES, "mistral", hf_family)
    model = tiny.make_model(tmp_path, "mistral", tied=False)
    shape = shapes.read_shape(tmp_path)
    worker = Worker(shape, processes, StageOptions(tokens_per_micro_batch=200, ops=backend("fused", CPU)))
    worker.load_hf(tmp_path)
    sample = backend("fused", CPU).sample_tokens
    engine = TorchEngine(shape, hf_shapes(shape), CPU, torch.float32, max_rows=8, sample=sample)
    engine.update_weights(worker.hf_tensors(), version=0)
    request = Request(Prompt("p", text="", token_ids=(5, 6, 7), answer=None, verifier="exact"), key=11, n=4)
    (group,) = engine.generate([request], Sampling(temperature=0.9, top_p=1.0, top_k=0, max_tokens=12, stop_ids=(2,)))
    responses = [rollout.token_ids for rollout in group]
    scored = worker.log_probs([torch.tensor([5, 6, 7])] * 4, responses, temperature=0.9)
    for rollout, actor_log_probs in zip(group, scored, strict=True):
        expected = tiny.log_probs(model, [5, 6, 7], rollout.token_ids, temperature=0.9)
        torch.testing.assert_close(rollout.log_probs, expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(actor_log_probs, expected, atol=1e-4, rtol=0)

    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "sliding_window"}))
    with pytest.raises(UserError, match="sliding_window = 4096 is not supported: only full attention"):
        shapes.read_shape(tmp_path)


def test_the_engine(model, tmp_path):
    """The engine samples repeatably from the weights of an update, with the log-probabilities of transformers."""
    directory, hf_model = model
    shape = shapes.read_shape(directory)
    fields = {"vocab": shape.vocab, "context": 40, "dtype": "float32", "max_rows": 8, "stop_ids": (2,), "section": {}}
    options = EngineOptions("transformers", str(directory), **fields)
    backend = module("megatron_brorl/rollout/remote/transformers/llm.py").TransformersBackend(options)
    update = WeightUpdate(version=0, names=hf_shapes(shape), dtype=torch.float32, encode=unchanged)
    weights = write_update(tiny.weights(directory).items(), update, NodeRanks(), tmp_path / "weights")
    with served(backend, tmp_path):
        engine = RemoteEngine(EngineConfig(), options, hf_shapes(shape), tmp_path, devices=None, log=tmp_path / "log")
        leader = Connection(address(tmp_path))
        ask(leader, Message("begin"))
        for bucket in weights.buckets(20_000):
            ask(leader, Message("load", {"bucket": {"path": str(weights.path), "records": bucket}}))
        ask(leader, Message("finish", {"version": 0}))
        engine.update_weights([], version=0)
        requests = [Request(Prompt("p", text="", token_ids=(5, 6), answer=None, verifier="exact"), key=7, n=4)]
        sampling = Sampling(temperature=0.8, top_p=1.0, top_k=0, max_tokens=12, stop_ids=(2,))
        (group,), (again,) = engine.generate(requests, sampling), engine.generate(requests, sampling)
        for rollout, same in zip(group, again, strict=True):
            assert rollout.token_ids.tolist() == same.token_ids.tolist()
            expected = tiny.log_probs(hf_model, [5, 6], rollout.token_ids, temperature=0.8)
            torch.testing.assert_close(rollout.log_probs, expected, atol=1e-4, rtol=0)
        assert len({tuple(r.token_ids.tolist()) for r in group}) > 1
