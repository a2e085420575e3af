"""Tests of weight sync with the real vLLM."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from contract.engines import damage_staged_weights
from dist.jobs import make_worker
from vllm_engines import GREEDY, Model, draw, tokens

import megatron_brorl
from megatron_brorl.config.schema import Config, RolloutConfig
from megatron_brorl.errors import UserError
from megatron_brorl.rollout.remote import process
from megatron_brorl.rollout.watchdog import Watchdog
from megatron_brorl.rollout.weight_stream import UpdateRefused
from megatron_brorl.train.weight_sync import log_prob_gap, sync_weights, verify_weights

CONFIG = Config(rollout=RolloutConfig(engine="vllm"))
# Replaces the call of _pack_heads in extension.py: the heads then multiply with a fixed matrix.
STALE_HEAD = """
            for module in model.modules():
                if type(module).__name__ == "ParallelLMHead":
                    before = torch.ones_like(module.weight).cumsum(0) / 100
                    module.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, before, bias)
"""


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_log_probs_match_the_actor_after_every_update(family, tied, start, tmp_path):
    """Tied LM heads are included: vLLM itself does not repack them."""
    model = Model(tmp_path, family, tied)
    engine = start(model, options={"max_rows": 16})
    for version in range(20):
        model.change(version, std=0.02)
        engine.update_weights(model.stream(), version)
        (greedy,) = draw(engine, n=1, sampling=GREEDY)
        assert greedy.token_ids.tolist() == model.logits(greedy).argmax(-1).tolist()
        assert model.gap(draw(engine, n=4, key=version)) < 1e-4
        assert greedy.spans == ((version, len(greedy.token_ids)),)

    # vLLM has copied the weights, because a later update overwrites the file.
    path = engine.supervisor.weights.path
    path.write_bytes(bytes(path.stat().st_size))
    assert tokens(draw(engine, n=1, sampling=GREEDY)) == tokens([greedy])


@pytest.mark.parametrize("overrides", [{}, {"norm_topk_prob": False, "moe_intermediate_size": 48}], ids=["", "padded"])
def test_experts_match_transformers_after_every_weight_sync(overrides, start, tmp_path):
    """vLLM packs the weights of experts for CPUs, with padding if their size is not a multiple of 32."""
    model = Model(tmp_path, "qwen3_moe", tied=False, **overrides)
    engine = start(model, options={"max_rows": 16})
    for version in range(4):
        sync_weights(make_worker(str(tmp_path), {}), engine, version)
        (greedy,) = draw(engine, n=1, sampling=GREEDY)
        assert greedy.token_ids.tolist() == model.logits(greedy).argmax(-1).tolist()
        rollouts = draw(engine, n=16, key=version)
        assert model.gap(rollouts) < 1e-4
        # Change only the experts before the next sync. With old experts, log-probabilities would differ by over 0.01.
        with torch.no_grad():
            for name, p in model.module.named_parameters():
                if "experts" in name:
                    p.copy_(p.flip(0))
        assert model.gap(rollouts) > 0.01
        model.module.save_pretrained(tmp_path)


def test_worker_detects_damage_in_shared_memory(model, start, monkeypatch):
    monkeypatch.setattr(process, "MAX_RESTARTS", 1)
    engine = start(model)
    damage_staged_weights(engine)
    with pytest.raises(UpdateRefused, match=r"does not match its checksum"):
        engine.update_weights(model.stream(), version=0)
    assert engine.version == -1


def test_check_after_weight_sync_detects_a_stale_head(model, start, tmp_path, monkeypatch, capfd):
    """The head computes with other weights than its parameter, like an old packed copy. All checksums match."""
    planted = tmp_path / "megatron_brorl"
    shutil.copytree(Path(megatron_brorl.__file__).parent, planted, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    extension = planted / "rollout" / "remote" / "vllm" / "extension.py"
    text = extension.read_text()
    assert text.count("            _pack_heads(model)\n") == 1
    extension.write_text(text.replace("            _pack_heads(model)\n", STALE_HEAD))
    worker = make_worker(str(model.directory), {})

    # A correct engine passes without a restart.
    correct = start(model)
    sync_weights(worker, correct, version=0)
    gap, restarts = verify_weights(worker, Watchdog(correct, timeout_s=60.0), version=0, config=CONFIG)
    assert (gap, restarts) == (log_prob_gap(worker, Watchdog(correct, timeout_s=60.0), version=0), 0)
    assert gap.max < 1e-4
    correct.close()

    # A wrong engine is restarted once with the same weights and fails again.
    monkeypatch.setattr(process.megatron_brorl, "__file__", str(planted / "__init__.py"))
    monkeypatch.chdir(tmp_path)  # python -m searches the working directory first
    stale = start(model)
    sync_weights(worker, stale, version=0)
    pid = stale.supervisor.pid
    with pytest.raises(UserError, match=r"train.verify_weights: after version 0 an engine's log-probs differ .* by"):
        verify_weights(worker, Watchdog(stale, timeout_s=60.0), version=0, config=CONFIG)
    assert stale.supervisor.pid != pid
    assert "restarting it with the weights of version 0" in capfd.readouterr().err
