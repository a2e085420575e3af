"""Options of the recipe in whole steps, on one process and in layouts."""

from __future__ import annotations

import math
from typing import Any

import fakes
import pytest
import torch
from by_hand import responses, right
from dist.jobs import streamed
from dist.steps import restore, take_steps, trainer_of

from megatron_brorl.config.schema import RolloutConfig
from megatron_brorl.families.shape import read_shape
from megatron_brorl.models.weights.names import hf_shapes
from megatron_brorl.ops.fused.decode import FusedDecode, sample_tokens
from megatron_brorl.rollout.native.torch_engine import TorchEngine
from megatron_brorl.train.collect import SourcePosition, round_size
from megatron_brorl.train.trainer import Trainer

pytestmark = pytest.mark.slow
SMALL = {"rollout": {"prompts": 3, "n": 16}}
DIVIDED = (4, {"tensor": 2, "pipeline": 2})  # ranks and layout


class Judge(fakes.Pool):
    """Give every answer the same reward."""

    def __init__(self, reward: float) -> None:
        self.reward = reward

    def judge(self, answer: str) -> float:
        return self.reward


def judged(
    _rank: int, directory: str, parallel: dict[str, Any], changes: dict[str, Any], reward: float, steps: int
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the metrics of each step, and the weights before and after."""
    trainer = trainer_of(directory, parallel, changes, pool=Judge(reward))
    before = streamed(trainer.models.actor)
    return take_steps(trainer, steps), before, streamed(trainer.models.actor)


def unmoved(
    _rank: int, directory: str, parallel: dict[str, Any], changes: dict[str, Any], steps: int
) -> tuple[list[dict[str, float]], bool]:
    """Take steps with the real engine; return metrics, and whether all weights and masters have the same bits."""
    shape = read_shape(directory)
    names = hf_shapes(shape)
    cpu = torch.device("cpu")
    engine = TorchEngine(shape, names, cpu, torch.float32, max_rows=200, sample=sample_tokens, ops=FusedDecode())
    trainer = trainer_of(directory, parallel, changes, engine)
    before = streamed(trainer.models.actor)
    metrics = take_steps(trainer, steps)
    after = streamed(trainer.models.actor)
    return metrics, all(torch.equal(after[name].view(torch.int32), before[name].view(torch.int32)) for name in before)


def reference_follows(
    _rank: int, directory: str, parallel: dict[str, Any], changes: dict[str, Any], root: str
) -> dict[str, Any]:
    """Take two steps, load their checkpoint, reset the reference, take a step; return log-probs and metrics."""
    changes = changes | {"run": {"seed": 3, "dir": root}}
    trainer = trainer_of(directory, parallel, changes)
    rows = ([torch.tensor([5, 6, 7]), torch.tensor([9, 4])], [torch.tensor([8, 9, 2]), torch.tensor([3])])
    assert trainer.models.reference is not None

    def log_probs(trainer: Trainer) -> dict[str, list[torch.Tensor]]:
        actor, reference = trainer.models.actor, trainer.models.reference
        assert reference is not None
        policies = {"actor": actor, "reference": reference, "actor again": actor}
        return {name: policy.log_probs(*rows, temperature=0.9) for name, policy in policies.items()}

    results: dict[str, Any] = {"start": log_probs(trainer)}
    results["metrics"] = take_steps(trainer, 2)
    results["moved"] = log_probs(trainer)
    results["stepped"] = bool(trainer.models.actor.optimizer.optimizer.state)
    trainer.save()
    second = trainer_of(directory, parallel, changes)
    restore(second)
    results["restored"] = log_probs(second)
    second.models.reference.reset()  # type: ignore[union-attr]
    results["reset"] = log_probs(second)
    results["metrics"] += take_steps(second, 1)
    return results


@pytest.mark.parametrize(("size", "reward", "critic"), [(1, 1.0, False), (2, 0.0, True)])
def test_a_step_without_kept_groups_changes_nothing(worlds, directory, size, reward, critic):
    changes = SMALL | ({"algo": {"advantage": "gae"}} if critic else {}) | {"reward": {"cut_off_factor": 1.0}}
    for metrics, before, after in worlds(size).run("test_recipe:judged", directory, {}, changes, reward, steps=2):
        assert all(torch.equal(after[name], weight) for name, weight in before.items())
        for row in metrics:
            assert (row["kept_share"], row["updates"], row["trained_tokens"]) == (0, 0, 0)
            assert (row["all_right_share"] > 0.5, row["all_wrong_share"] > 0.5) == (reward == 1, reward == 0)
            assert row.get("critic_updates", 0) == 0
            assert math.isfinite(row["loss"])


@pytest.mark.parametrize(("size", "parallel", "critic"), [(1, {}, False), (*DIVIDED, True)])
def test_a_learning_rate_of_zero_moves_nothing(worlds, directory, size, parallel, critic):
    """In three steps with the real engine the weights do not change, ratios are 1, and the mismatch does not grow."""
    algo = {"mini_batches": 2, "epochs": 2, "entropy_coef": 0.01, "kl_coef": 0.1, "dynamic_sampling": False}
    changes = {
        "rollout": {"prompts": 3, "n": 8, "timeout_s": 60.0, "max_lost_share": 1.0, "max_tokens": 12},
        "algo": algo | ({"advantage": "gae"} if critic else {}),
        "optim": {"lr": 0.0, "weight_decay": 0.1},
        "critic": {"lr": 1e-3},
    }
    for metrics, unchanged in worlds(size).run("test_recipe:unmoved", directory, parallel, changes, steps=3):
        assert unchanged
        assert len(metrics) == 3
        for row in metrics:
            assert (row["updates"], row["updates_skipped"]) == (4, 0)  # 2 epochs of 2 mini-batches
            assert row["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
            assert row["ratio_max"] == pytest.approx(1.0, abs=1e-5)
            assert row["approx_kl"] == pytest.approx(0.0, abs=1e-9)
            assert row["reference_kl"] == pytest.approx(0.0, abs=1e-9)
            assert row["logprob_gap_max"] <= 1e-4
            assert row["grad_norm"] > 0
        gaps = [row["logprob_gap_mean"] for row in metrics]
        assert 0 < max(gaps) < 2 * min(gaps)  # rounding only, no trend


@pytest.mark.parametrize(("size", "parallel"), [(2, {}), DIVIDED])
def test_the_reference_stays_while_the_actor_moves(worlds, directory, tmp_path, size, parallel):
    changes = SMALL | {"algo": {"kl_coef": 0.1}, "reference": {"reset_every": 7}}  # no reset by itself
    for results in worlds(size).run("test_recipe:reference_follows", directory, parallel, changes, str(tmp_path)):

        def flat(when, policy, results=results):
            return torch.cat(results[when][policy])

        # log_probs of the reference do not change the actor.
        for when in ("start", "moved", "restored", "reset"):
            assert torch.equal(flat(when, "actor"), flat(when, "actor again"))
        assert torch.equal(flat("start", "actor"), flat("start", "reference"))
        assert torch.equal(flat("moved", "reference"), flat("start", "reference"))
        assert (flat("moved", "actor") - flat("start", "actor")).abs().max() > 1e-3
        assert torch.equal(flat("restored", "actor"), flat("moved", "actor"))
        assert torch.equal(flat("restored", "reference"), flat("moved", "reference"))
        assert torch.equal(flat("reset", "reference"), flat("moved", "actor"))
        assert results["stepped"]
        # The weights are equal before the first step, and reference_follows resets the reference before the third.
        first, second, third = (row["reference_kl"] for row in results["metrics"])
        assert (first, third) == pytest.approx((0, 0))
        assert second > 1e-8


def rewards_of(prompt, stream, n=16):
    """Return the rewards of a prompt's rollouts by the fake engine and pool in the round `stream`."""
    return list(map(right, responses(seed=3, prompt=prompt, n=n, tokens=12, stream=stream)))


@pytest.mark.parametrize(("size", "parallel"), [(1, {}), (4, {"tensor": 2})])
def test_refills_with_carried_rollouts(worlds, directory, size, parallel):
    """The three siblings of a prompt often agree, so rounds follow until two groups are kept, at most three rounds.

    The learning rate counts the rollouts of the kept groups."""
    changes = {"rollout": {"prompts": 2, "n": 3, "refills": 2}, "optim": {"lr": 1e-3, "lr_for_rollouts": 24}}
    results = worlds(size).run("steps:run_steps", directory, parallel, changes, steps=8, faults={})
    rounds = 0
    prompts_taken = 0
    waiting = []
    different_values = set()
    recent_prompts = 0.0
    recent_kept = 0.0
    for step in range(8):
        pool = list(waiting)
        sampled = 0
        missing = 2 - len(waiting)
        rounds_before = rounds
        prompts_before = recent_prompts
        kept_before = recent_kept
        for _round in range(3):
            position = SourcePosition(recent_prompts=recent_prompts, recent_kept=recent_kept)
            count = round_size(missing, position, RolloutConfig(**changes["rollout"]))
            pool += [(rounds, p) for p in fakes.prompts(count, first=prompts_taken)]
            rounds += 1
            prompts_taken += count
            sampled += count
            kept = [(stream, prompt) for stream, prompt in pool if 0 < sum(rewards_of(prompt, stream, n=3)) < 3]
            missing = 2 - len(kept)
            recent_prompts = 0.5 * prompts_before + sampled  # each step halves the weight of earlier ones
            recent_kept = 0.5 * kept_before + len(kept) - len(waiting)
            if missing <= 0:
                break
        waiting = kept[2:]
        closed = [group for group in pool if group not in waiting]
        different_values |= {("rounds", rounds - rounds_before), ("waiting", len(waiting)), ("sampled", sampled)}
        for metrics, _, _ in results:
            row = metrics[step]
            assert row["prompts_sampled"] == sampled
            assert row["rounds"] == rounds - rounds_before
            assert row["surplus_groups"] == len(waiting)
            assert row["kept_share"] == pytest.approx(len(kept[:2]) / len(closed))
            assert row["rollouts"] == 3 * len(closed)
            assert row["updates"] == (1 if kept else 0)
            assert row["lr"] == pytest.approx(1e-3 * math.sqrt(3 * len(kept[:2]) / 24))
    assert len(different_values) >= 6  # The steps differ in rounds, waiting groups or sampled prompts.


def test_cut_off_responses_without_loss(worlds, directory):
    """With algo.overlong_filter, responses that were cut off are not trained on; metrics still count them."""
    for overlong_filter in (False, True):
        changes = {"rollout": {"prompts": 3, "n": 16}, "algo": {"overlong_filter": overlong_filter}}
        ((metrics, *_),) = worlds(1).run("steps:run_steps", directory, {}, changes, steps=1, faults={})
        lengths = []
        for prompt in fakes.prompts(3):
            rewards = rewards_of(prompt, stream=0)
            if 0 < sum(rewards) < 16:
                rows = responses(seed=3, prompt=prompt, n=16, tokens=12)
                lengths += [len(row) for row in rows if row[-1] == fakes.STOP or not overlong_filter]
        assert metrics[0]["trained_tokens"] == sum(lengths)
        assert metrics[0]["rollouts"] == 3 * 16


def test_shaping_reaches_the_advantages_and_not_the_selection(worlds, directory):
    shaping = {"overlong_tokens": 6, "cosine_coef": 1.0, "repetition_ngram": 1}
    ((plain, *_),) = worlds(1).run("steps:run_steps", directory, {}, SMALL, steps=1, faults={})
    ((shaped, *_),) = worlds(1).run("steps:run_steps", directory, {}, SMALL | {"shaping": shaping}, steps=1, faults={})
    unshaped = ("reward", "kept_share", "rollouts")
    assert [shaped[0][key] for key in unshaped] == [plain[0][key] for key in unshaped]
    total = 0.0  # the terms of ShapingConfig for at most 12 tokens
    for prompt in fakes.prompts(3):
        for row in responses(seed=3, prompt=prompt, n=16, tokens=12):
            t = len(row)
            total += right(row) * (1 + (math.cos(math.pi * t / 12) - 1) / 4) - max(0, t - 6) / 6
            total -= 0.001 * (t - len(set(row)))  # tokens that have occurred before
    assert shaped[0]["shaped_reward"] == pytest.approx(total / (3 * 16), rel=1e-5)
    assert shaped[0]["grad_norm"] != plain[0]["grad_norm"]
