"""Rewards of every kind in a whole step, from verifier to gradient, against a step written out by hand."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import fakes
import pytest
import torch
from by_hand import assert_update, responses, without_stop
from dist.steps import configured, make_trainer
from step_verifiers import RULES

from megatron_brorl.algo.advice import why_no_signal
from megatron_brorl.errors import UserError
from megatron_brorl.rewards import registry
from megatron_brorl.rewards.worker_pool import RewardPool
from megatron_brorl.train.console import console_line, evaluation_line, evaluation_metrics

N, TOKENS = 32, 12
# The verifier of each prompt of a step.
BATCHES = {
    "mixed": ["right", "even", "wrong"],
    "all right": ["right"] * 3,
    "all wrong": ["wrong"] * 3,
    "continuous": ["share", "right", "share"],
    "below 0 and above 1": ["stretched", "right", "stretched"],
    "some are NaN": ["some_nan", "even", "right"],
    "a group is NaN": ["even", "nan", "even"],
}


@pytest.fixture(autouse=True)
def register_verifiers(monkeypatch):
    """Register the verifiers, because the trainer looks up how they extract answers."""
    for name in (*RULES, "nonsense"):
        monkeypatch.setitem(registry.ENTRIES, name, registry.ENTRIES["exact"])


@pytest.fixture(scope="module")
def pool():
    with RewardPool(workers=1, timeout_s=5.0, judge_factory="step_verifiers:make") as pool:
        yield pool


def trainer_of(model, processes, pool, rules, changes):
    reward = {"cut_off_factor": 1.0, "extract": "full"}
    one_micro_batch = {"tokens_per_micro_batch": 3 * N * 24}
    config = configured({"rollout": {"n": N, "prompts": 3}, "reward": reward, "train": one_micro_batch, **changes})
    batch = [replace(p, verifier=rule) for p, rule in zip(fakes.prompts(3), rules, strict=True)]
    trainer = make_trainer(model[0], processes, config, fakes.Engine(), pool=pool, batch=batch)
    trainer.sync_weights()
    return trainer


def groups_of(seed, rules):
    """Return groups of prompt, responses and rewards, with NaN as 0, and the number of NaNs."""
    groups = []
    nan_count = 0
    for prompt, rule in zip(fakes.prompts(3), rules, strict=True):
        rows = responses(seed, prompt, N, TOKENS)
        raw = [RULES[rule](without_stop(row)) for row in rows]
        nan_count += sum(map(math.isnan, raw))
        groups.append((prompt, rows, [0.0 if math.isnan(r) else r for r in raw]))
    return groups, nan_count


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic sampling", "every group"])
@pytest.mark.parametrize("batch", BATCHES)
def test_step_equals_one_by_hand(processes, pool, model, batch, dynamic):
    rules = BATCHES[batch]
    # Without decay, only gradients change the weights.
    changes = {"algo": {"dynamic_sampling": dynamic}, "optim": {"weight_decay": 0.0, "lr": 1e-3}}
    trainer = trainer_of(model, processes, pool, rules, changes)
    before = {name: tensor.clone() for name, tensor in trainer.models.actor.hf_tensors()}
    values, _ = trainer.train_step()
    after = dict(trainer.models.actor.hf_tensors())

    groups, nan_count = groups_of(trainer.config.run.seed, rules)
    rewards_of_groups = [group_rewards for _, _, group_rewards in groups]
    kept = [(p, rows, r) for p, rows, r in groups if not dynamic or len(set(r)) > 1]
    rewards = [r for group_rewards in rewards_of_groups for r in group_rewards]
    assert values["unscored_share"] == nan_count / (3 * N)
    assert values["reward"] == pytest.approx(sum(rewards) / (3 * N))
    assert values["kept_share"] == pytest.approx(len(kept) / 3)
    assert values["reward_std"] == pytest.approx(statistics.pstdev(rewards), rel=1e-6)
    # A response is right if its reward is at least reward.correct_at = 1.
    assert values["all_right_share"] == pytest.approx(sum(min(r) >= 1 for r in rewards_of_groups) / 3)
    assert values["all_wrong_share"] == pytest.approx(sum(max(r) < 1 for r in rewards_of_groups) / 3)
    has_signal = any(len(set(r)) > 1 for r in rewards_of_groups)
    assert (why_no_signal(values) is None) == has_signal
    assert values["updates_skipped"] == 0
    assert has_signal == (batch not in ("all right", "all wrong"))
    if has_signal:
        assert_update(values, model[1], kept, trainer.config.algo.is_cap)
        assert values["updates"] == 1
        shared = sum(len(p.token_ids) + sum(len(row) - 1 for row in rows) for p, rows, _ in kept)
        plain = sum(len(p.token_ids) + len(row) - 1 for p, rows, _ in kept for row in rows)
        assert values["token_gain"] == pytest.approx(plain / shared)
        assert all(torch.isfinite(tensor).all() for tensor in after.values())
    else:  # nothing to learn: no update, or one whose gradient is exactly 0
        assert values["updates"] == (0 if dynamic else 1)
        assert values["grad_norm"] == 0
    assert has_signal != all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_step_with_only_nan_rewards_ends_the_run(processes, pool, model):
    trainer = trainer_of(model, processes, pool, ["nan"] * 3, {})
    with pytest.raises(UserError, match="step 1: the verifiers failed on 96 of 96 responses"):
        trainer.train_step()
    assert trainer.models.actor.optimizer.optimizer.state == {}  # no update


def with_reference(trainer, answer):
    """Give the trainer's prompts this reference answer."""
    source = trainer.train_source
    source.batch = [replace(p, answer=answer) for p in source.batch]


def test_verifier_exceptions_count_as_zero_and_are_reported_once(processes, pool, model, capfd):
    trainer = trainer_of(model, processes, pool, ["picky"] * 3, {})
    with_reference(trainer, "4")
    values, _ = trainer.train_step()
    rows = [row for p in fakes.prompts(3) for row in responses(trainer.config.run.seed, p, N, TOKENS)]
    odd = sum(sum(without_stop(row)) % 2 for row in rows)
    assert values["verifier_errors"] == odd > 0
    assert values["unscored_share"] == 0
    assert values["reward"] == pytest.approx(1 - odd / (3 * N))
    assert console_line(values | {"logprob_gap_max": 0.0}, {"step": 1.0})["verifier raised"] == f"{odd}x"
    trainer.train_step()
    warnings = [line for line in capfd.readouterr().err.splitlines() if "verifier" in line]
    message = "verifier picky raised on an answer, which scores 0 (metric verifier_errors)"
    assert warnings == [f"{message}: ZeroDivisionError: division by zero (step_verifiers.py, line 20)"]


@pytest.mark.parametrize(
    ("answer", "detail"), [("4", "on a reference answer too: KeyError"), (None, "KeyError: 'nonsense'")]
)
def test_a_step_or_evaluation_whose_responses_all_raised_ends_the_run(processes, pool, model, capfd, answer, detail):
    """Without a reference answer, no check finds the verifier broken."""
    trainer = trainer_of(model, processes, pool, ["nonsense"] * 3, {})
    with_reference(trainer, answer)
    with pytest.raises(UserError, match=rf"^step 1: the verifiers failed on 96 of 96 responses .*{detail}"):
        trainer.train_step()
    assert trainer.models.actor.optimizer.optimizer.state == {}
    broken = "verifier nonsense is broken: it raises on a reference answer too: KeyError: 'nonsense'"
    assert (broken in capfd.readouterr().err) == (answer is not None)
    trainer.held_out = trainer.train_source.batch
    with pytest.raises(UserError, match=r"^evaluation: the verifiers failed on"):
        trainer.evaluate(fakes.Notes())


@pytest.mark.parametrize("correct_at", [0.5, 3.5])
def test_reward_correct_at_decides_right_responses(processes, pool, model, correct_at):
    """Check pass@1, the shares of groups and the boost of correct responses. Rewards do not change."""
    changes = {"reward": {"correct_at": correct_at, "cut_off_factor": 1.0}}
    rules = ["stretched", "right", "half"]
    trainer = trainer_of(model, processes, pool, rules, changes)
    values, _ = trainer.train_step()
    groups, _ = groups_of(trainer.config.run.seed, rules)
    rewards = [group_rewards for _, _, group_rewards in groups]
    assert values["reward"] == pytest.approx(sum(map(sum, rewards)) / (3 * N))
    assert values["all_right_share"] == pytest.approx(sum(min(r) >= correct_at for r in rewards) / 3)
    assert values["all_wrong_share"] == pytest.approx(sum(max(r) < correct_at for r in rewards) / 3)

    trainer.held_out = trainer.train_source.batch
    evaluation = trainer.evaluate(fakes.Notes())
    held_out_rewards = []
    for prompt in trainer.held_out:
        rows = responses(trainer.config.run.seed, prompt, trainer.config.evaluate.samples, TOKENS, stream="evaluate")
        held_out_rewards.append([RULES[prompt.verifier](without_stop(row)) for row in rows])
    right = [sum(r >= correct_at for r in row) / len(row) for row in held_out_rewards]
    assert evaluation.pass_at_1.mean == pytest.approx(sum(right) / 3)
    assert evaluation.mean_reward.mean == pytest.approx(sum(map(statistics.fmean, held_out_rewards)) / 3)
    assert evaluation.mean_reward.low <= evaluation.mean_reward.mean <= evaluation.mean_reward.high
    line = evaluation_line(evaluation.as_dict())
    assert f"mean reward {evaluation.mean_reward.mean:.4g} (95% interval {evaluation.mean_reward.low:.4g} to " in line
    assert evaluation_metrics(evaluation)["held_out_reward"] == evaluation.mean_reward.mean
