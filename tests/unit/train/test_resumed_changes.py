"""A resumed run with changed optimizer settings: its next step is AdamW with the new settings and the old moments."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from unit.train.test_updates_counted import trainer_of

BEFORE = {"weight_decay": 0.1, "eps": 1e-8, "clip_grad": 1.0, "warmup_steps": 0}


@pytest.mark.parametrize(
    "after",
    [
        {"lr_schedule": "linear", "min_lr_ratio": 0.5, "clip_grad": 1e-3},
        {"warmup_steps": 8, "weight_decay": 0.5},
        {"lr": 3e-4, "eps": 1e-4, "weight_decay": 0.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("critic", [False, True], ids=["actor", "critic"])
def test_next_step_uses_the_new_settings(processes, model, tmp_path, after, critic):
    gae = {"advantage": "gae"} if critic else {}
    sections = {"algo": {"mini_batches": 1, **gae}, "critic": {"lr": 2e-3}, "train": {"steps": 5}}
    first = trainer_of(model, processes, {**sections, "optim": BEFORE}, tmp_path)
    for _ in range(2):
        first.train_step()
    first.save()

    resumed = trainer_of(model, processes, {**sections, "optim": {**BEFORE, **after}}, tmp_path)
    resumed.restore(tmp_path / "checkpoints" / "step_00000002")
    resumed.sync_weights()
    stage = resumed.models.critic if critic else resumed.models.actor
    before = {name: p.detach().clone().double() for name, p in stage.module.named_parameters()}
    adam = stage.optimizer.chained_optimizers[0].optimizer
    moments = {p: (s["exp_avg"].clone().double(), s["exp_avg_sq"].clone().double()) for p, s in adam.state.items()}
    metrics, _ = resumed.train_step()

    # AdamW (Loshchilov & Hutter 2019), from the moments of the checkpoint and the gradient that changed them.
    optim = resumed.config.optim
    lr = metrics["critic_lr" if critic else "lr"]
    assert metrics["critic_updates" if critic else "updates"] == 1
    names = {p: name for name, p in stage.module.named_parameters()}
    squared_norm = 0.0
    for group in adam.param_groups:
        for p in group["params"]:
            state = adam.state[p]
            old = before[names[p]]
            gradient = (state["exp_avg"].double() - 0.9 * moments[p][0]) / 0.1
            squared_norm += float(gradient.square().sum())
            m = 0.9 * moments[p][0] + 0.1 * gradient
            v = 0.999 * moments[p][1] + 0.001 * gradient.square()
            t = int(state["step"])
            assert t == 3
            decay = optim.weight_decay if old.dim() > 1 else 0.0
            step = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + optim.eps)
            expected = old * (1 - lr * decay) - lr * step
            torch.testing.assert_close(p.detach().double(), expected, rtol=1e-5, atol=1e-7)
    norm = metrics["critic_grad_norm" if critic else "grad_norm"]
    assert squared_norm**0.5 == pytest.approx(min(norm, optim.clip_grad), rel=1e-2)


def test_fewer_rollouts_and_prompts(processes, model, tmp_path):
    """The prompt source continues at its position, independent of earlier step sizes."""
    first = trainer_of(model, processes, {}, tmp_path)
    for _ in range(2):
        first.train_step()
    first.save()
    resumed = trainer_of(model, processes, {"rollout": {"n": 4, "prompts": 2, "temperature": 0.5}}, tmp_path)
    resumed.restore(tmp_path / "checkpoints" / "step_00000002")
    resumed.sync_weights()
    engine = resumed.runner.engine.engine
    metrics, _ = resumed.train_step()
    assert metrics["rollouts"] == 8
    assert [request.prompt.id for request in engine.calls[-1]] == ["p/6", "p/7"]
    assert resumed.state.source_position == replace(resumed.state.source_position, rounds=3, prompts_read=8)
