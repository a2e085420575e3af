"""New weights in the real vLLM: every refit computes what the actor computes, and what is planted is found."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from dist.jobs import make_worker
from vllm_engines import GREEDY, Model, draw, tokens

import megatron_brorl
from megatron_brorl.config.schema import Config, RolloutConfig
from megatron_brorl.errors import UserError
from megatron_brorl.ops.checksum import ChecksummedTensor
from megatron_brorl.rollout.remote import process
from megatron_brorl.rollout.watchdog import Watchdog
from megatron_brorl.rollout.weight_receiver import UpdateRefused
from megatron_brorl.train.weight_sync import log_prob_gap, sync_weights, verify_weights

CONFIG = Config(rollout=RolloutConfig(engine="vllm"))
STALE = """
            for module in model.modules():
                if type(module).__name__ == "ParallelLMHead":
                    before = torch.ones_like(module.weight).cumsum(0) / 100
                    module.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, before, bias)
"""


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_twenty_refits_each_are_the_actor(family, tied, start, tmp_path):
    """A tied LM head is packed anew as well (vLLM alone would leave it as it was)."""
    model = Model(tmp_path, family, tied)
    engine = start(model, options={"max_rows": 16})
    for version in range(20):
        model.change(version, std=0.02)
        engine.update_weights(model.stream(), version)
        (greedy,) = draw(engine, 1, sampling=GREEDY)
        assert greedy.token_ids.tolist() == model.logits(greedy).argmax(-1).tolist()
        assert model.gap(draw(engine, 4, key=version)) < 1e-4
        assert greedy.spans == ((version, len(greedy.token_ids)),)


def _dropped(pairs: list[ChecksummedTensor]) -> list[ChecksummedTensor]:
    return pairs[:5] + pairs[8:]


def _swapped(pairs: list[ChecksummedTensor]) -> list[ChecksummedTensor]:
    """Two tensors of one shape under each other's name, each with the checksum that it had."""
    a, b = [i for i, (name, _) in enumerate(pairs) if name.endswith("input_layernorm.weight")][:2]
    (name, tensor), (other, another) = pairs[a], pairs[b]
    pairs[a], pairs[b] = (
        ChecksummedTensor(name, another, pairs[b].checksum),
        ChecksummedTensor(other, tensor, pairs[a].checksum),
    )
    return pairs


def _flipped(pairs: list[ChecksummedTensor]) -> list[ChecksummedTensor]:
    name, tensor = pairs[3]
    tensor = tensor.clone()
    tensor.view(torch.int32).view(-1)[1] ^= 1
    pairs[3] = ChecksummedTensor(name, tensor, pairs[3].checksum)
    return pairs


@pytest.mark.parametrize("fault", [_dropped, _swapped, _flipped], ids=lambda f: f.__name__[1:])
def test_a_faulty_stream_costs_the_engine_nothing(fault, model, shared):
    before, pid = tokens(draw(shared)), shared.supervisor.pid
    with pytest.raises(UpdateRefused):
        shared.update_weights(fault(list(model.stream())), 1)
    assert shared.version == 0
    assert tokens(draw(shared)) == before
    assert shared.supervisor.pid == pid


def test_damage_in_shared_memory_is_seen_by_the_worker(model, start, monkeypatch):
    """A bit of the file is another one before the engine reads it: the engine is started again, and refused there."""
    engine = start(model, config={"max_restarts": 1})
    stage = engine._stage

    def spoiled(tensors, version):
        weights = stage(tensors, version)
        with open(weights.path, "r+b") as file:
            file.seek(weights.records[7].offset + 5)
            file.write(b"\x55")
        return weights

    engine._stage = spoiled
    with pytest.raises(UpdateRefused, match=r"is not what was sent \(checksum\)"):
        engine.update_weights(model.stream(), 0)
    assert engine.version == -1


def test_a_stale_head_is_found_by_the_probe(model, start, tmp_path, monkeypatch, processes, capfd):
    """The engine's own code with a head that computes by other weights than its parameter, as one whose packed copy
    stays behind: all checksums agree, the probe does not."""
    planted = tmp_path / "megatron_brorl"
    shutil.copytree(Path(megatron_brorl.__file__).parent, planted, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    extension = planted / "rollout" / "remote" / "vllm" / "extension.py"
    text = extension.read_text()
    assert text.count("            _pack_heads(model)\n") == 1
    extension.write_text(text.replace("            _pack_heads(model)\n", STALE))
    worker = make_worker(str(model.directory), {})

    # What is right passes, and costs no restart.
    right = start(model)
    sync_weights(worker, right, 0)
    gap, again = verify_weights(worker, Watchdog(right, 60.0), 0, CONFIG)
    assert (gap, again) == (log_prob_gap(worker, Watchdog(right, 60.0), 0), 0)
    assert gap.max < 1e-4
    right.close()

    # What is not is started anew once, with the same weights, and is as wrong.
    monkeypatch.setattr(process.megatron_brorl, "__file__", str(planted / "__init__.py"))
    monkeypatch.chdir(tmp_path)  # python -m looks there first
    wrong = start(model)
    sync_weights(worker, wrong, 0)
    pid = wrong.supervisor.pid
    with pytest.raises(UserError, match=r"train.verify_reshard: after version 0 an engine's log-probs differ .* by"):
        verify_weights(worker, Watchdog(wrong, 60.0), 0, CONFIG)
    assert wrong.supervisor.pid != pid
    assert "starting it again with the weights of version 0" in capfd.readouterr().err
