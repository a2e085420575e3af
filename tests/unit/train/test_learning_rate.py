"""The learning-rate schedule: closed forms, whole steps, the critic and `brorl sft`."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from types import SimpleNamespace

import fakes
import pytest
import torch
from unit.train.test_nonfinite_rows import SftData
from unit.train.test_updates_counted import trainer_of

from megatron_brorl.config.schema import OptimConfig, SftConfig
from megatron_brorl.train.learning_rate import learning_rate
from megatron_brorl.train.sft import sft, sft_optim
from megatron_brorl.types import Demonstration

R = math.sqrt(2) / 2  # cos(pi / 4)


@pytest.mark.parametrize(
    ("optim", "total", "expected"),
    [
        (OptimConfig(lr=8.0), 0, [8, 8, 8]),
        (OptimConfig(lr=8.0, warmup_steps=4), 0, [2, 4, 6, 8, 8, 8]),
        (OptimConfig(lr=8.0, lr_schedule="linear"), 4, [8, 6, 4, 2, 0, 0]),
        (OptimConfig(lr=8.0, lr_schedule="linear", min_lr_ratio=0.5), 4, [8, 7, 6, 5, 4, 4]),
        (OptimConfig(lr=8.0, warmup_steps=2, lr_schedule="linear"), 6, [4, 8, 8, 6, 4, 2, 0, 0]),
        # (1 + cos(pi x)) / 2 at x = 0, 1/4, 1/2, 3/4, 1
        (OptimConfig(lr=8.0, lr_schedule="cosine"), 4, [8, 4 + 4 * R, 4, 4 - 4 * R, 0, 0]),
        (
            OptimConfig(lr=8.0, warmup_steps=1, lr_schedule="cosine", min_lr_ratio=0.25),
            5,
            [8, 8, 5 + 3 * R, 5, 5 - 3 * R, 2, 2],
        ),
        (OptimConfig(lr=8.0, lr_schedule="cosine", min_lr_ratio=1.0), 3, [8, 8, 8, 8]),
        # A run that is shorter than the warm-up only warms up.
        (OptimConfig(lr=8.0, warmup_steps=4, lr_schedule="cosine"), 2, [2, 4]),
        (OptimConfig(lr=0.0, warmup_steps=2, lr_schedule="cosine"), 4, [0, 0, 0, 0]),
    ],
)
def test_closed_forms(optim, total, expected):
    rates = [learning_rate(optim, i, total) for i in range(len(expected))]
    assert rates == pytest.approx(expected, rel=1e-12, abs=1e-15)


def last_rates(trainer, plan):
    """Return (actor, critic) learning rates in the last update of each step. plan: whether a step has a signal."""
    rates = []
    for has_signal in plan:
        trainer.runner.pool.all_right = not has_signal
        metrics, _ = trainer.train_step()
        rates.append((metrics["lr"], metrics.get("critic_lr")))
    return rates


def test_decay_spans_the_run_and_continues_after_resume(processes, model, tmp_path):
    """Five steps of two updates each. The third step has no update, so the run ends at update 8 of 10."""
    optim = {"lr_schedule": "linear", "warmup_steps": 2, "min_lr_ratio": 0.2}
    changes = {"optim": optim, "train": {"steps": 5}}
    first = trainer_of(model, processes, changes, tmp_path)
    rates = last_rates(first, (True, True, False))
    first.save()
    resumed = trainer_of(model, processes, changes, tmp_path)
    resumed.restore(tmp_path / "checkpoints" / "step_00000003")
    rates += last_rates(resumed, (True, True))
    # The last updates of the steps are u = 1, 3, 5 and 7 of 10. After 2 of warm-up, (u - 2) / 8 of the decay is done.
    expected = [1e-3, *(1e-3 * (0.2 + 0.8 * (1 - (u - 2) / 8)) for u in (3, 5, 7))]
    assert [lr for lr, _ in rates if lr] == pytest.approx(expected, rel=1e-12)
    assert rates[2][0] == 0
    assert {group["lr"] for group in resumed.models.actor.optimizer.param_groups} == {rates[-1][0]}


def test_actor_and_critic_decay_over_their_own_updates(processes, model):
    """critic.warmup_steps = 2 of 5 steps: 10 updates of the critic, 6 of the actor."""
    changes = {
        "algo": {"advantage": "gae", "mini_batches": 2},
        "critic": {"lr": 4e-3, "warmup_steps": 2},
        "optim": {"lr_schedule": "cosine", "warmup_steps": 0},
        "train": {"steps": 5},
    }
    rates = last_rates(trainer_of(model, processes, changes), (True,) * 5)
    critic = [4e-3 * (1 + math.cos(math.pi * u / 10)) / 2 for u in (1, 3, 5, 7, 9)]
    actor = [0, 0, *(1e-3 * (1 + math.cos(math.pi * u / 6)) / 2 for u in (1, 3, 5))]
    assert [lr for lr, _ in rates] == pytest.approx(actor, rel=1e-12)
    assert [lr for _, lr in rates] == pytest.approx(critic, rel=1e-12)


# Ids and masks of responses for supervised training. The last one is the answer of a prompt without a demonstration.
RESPONSES = [((40, 2, 51, 52, 7, 2), "110011"), ((60, 61, 9), "001"), ((12, 31, 2, 5), "1010"), ((7, 11, 2), "111")]


def test_sft_follows_the_schedule_and_trains_only_on_turns_of_the_model(processes, model, monkeypatch):
    """Check the rates of all steps, and the loss and the gradient of the first step against a loop in float64."""
    monkeypatch.setattr("megatron_brorl.train.sft.WARMUP_STEPS", 1)
    config = SftConfig(steps=5, examples_per_step=4, lr=1e-3)
    optim = sft_optim(config, OptimConfig(lr=7.0, lr_schedule="linear", min_lr_ratio=0.5))
    demonstrations = [*(Demonstration(ids, tuple(char == "1" for char in mask)) for ids, mask in RESPONSES[:-1]), None]
    prompts = [replace(p, answer="7", demonstration=d) for p, d in zip(fakes.prompts(4), demonstrations, strict=True)]
    source = SimpleNamespace(prompts=lambda _start, _count: prompts)
    rows = []
    writer = SimpleNamespace(write=lambda _step, metrics, _seconds: rows.append(metrics))
    sft(trainer_of(model, processes, {}).models.actor, source, SftData(), config, optim, writer, fakes.Notes())
    assert [row["lr"] for row in rows] == pytest.approx([1e-3, 1e-3, 0.875e-3, 0.75e-3, 0.625e-3], rel=1e-12)

    exact = copy.deepcopy(model[1]).double()
    losses = []
    for prompt, (ids, mask) in zip(prompts, RESPONSES, strict=True):
        log_probs = exact(torch.tensor([[*prompt.token_ids, *ids]])).logits[0].log_softmax(-1)
        tokens = zip(log_probs[len(prompt.token_ids) - 1 :], ids, mask, strict=False)
        losses += [-row[token] for row, token, char in tokens if char == "1"]
    loss = torch.stack(losses).mean()
    loss.backward()
    norm = sum(float(p.grad.square().sum()) for p in exact.parameters()) ** 0.5
    first_step = rows[0]["tokens"], rows[0]["loss"], rows[0]["grad_norm"]
    assert first_step == pytest.approx((len(losses), float(loss.detach()), norm), rel=1e-5)


def test_sft_has_its_own_rate_warm_up_and_decay():
    optim = OptimConfig(lr=1.0, weight_decay=0.5, betas=(0.5, 0.6), eps=1e-3, clip_grad=7.0)
    assert sft_optim(SftConfig(lr=0.25), optim) == replace(optim, lr=0.25, warmup_steps=10, weight_decay=0.01)
