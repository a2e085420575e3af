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
DIVIDED = (4, {"tensor": 2, "pipeline": 2})


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
    engine = TorchEngine(shape, hf_shapes(shape), torch.device("cpu"), torch.float32, 200, sample_tokens, FusedDecode())
    trainer = trainer_of(directory, parallel, changes, engine)
    before = streamed(trainer.models.actor)
    metrics = take_steps(trainer, steps)
    after = streamed(trainer.models.actor)
    return metrics, all(torch.equal(after[name].view(torch.int32), before[name].view(torch.int32)) for name in before)


def reference_follows(
    _rank: int, directory: str, parallel: dict[str, Any], changes: dict[str, Any], root: str
) -> dict[str, Any]:
    """Take two steps; return the log-probs of actor and reference then, after a reset, and after a checkpoint."""
    changes = changes | {"run": {"seed": 3, "dir": root}}
    trainer = trainer_of(directory, parallel, changes)
    rows = ([torch.tensor([5, 6, 7]), torch.tensor([9, 4])], [torch.tensor([8, 9, 2]), torch.tensor([3])])
    assert trainer.models.reference is not None

    def log_probs(t: Trainer) -> list[list[torch.Tensor]]:
        actor, reference = t.models.actor, t.models.reference
        assert reference is not None
        return [policy.log_probs(*rows, 0.9) for policy in (actor, reference, actor)]

    results: dict[str, Any] = {"start": log_probs(trainer)}
    results["metrics"] = take_steps(trainer, 2)
    results["moved"] = log_probs(trainer)
    results["stepped"] = bool(trainer.models.actor.optimizer.optimizer.state)
    trainer.save()
    again = trainer_of(directory, parallel, changes)
    restore(again)
    results["restored"] = log_probs(again)
    again.models.reference.reset()  # type: ignore[union-attr]
    results["reset"] = log_probs(again)
    results["metrics"] += take_steps(again, 1)
    return results


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("size", "reward", "critic"), [(1, 1.0, False), (2, 0.0, True)])
def test_a_step_without_kept_groups_changes_nothing(worlds, directory, size, reward, critic):
    changes = SMALL | ({"algo": {"advantage": "gae"}} if critic else {}) | {"reward": {"cut_off_factor": 1.0}}
    for metrics, before, after in worlds(size).run("test_recipe:judged", directory, {}, changes, reward, 2):
        assert same(before, after)
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
    for metrics, kept in worlds(size).run("test_recipe:unmoved", directory, parallel, changes, 3):
        assert kept
        assert len(metrics) == 3
        for row in metrics:
            assert (row["updates"], row["updates_skipped"]) == (4, 0)
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
    changes = SMALL | {"algo": {"kl_coef": 0.1}, "reference": {"reset_every": 7}}
    for record in worlds(size).run("test_recipe:reference_follows", directory, parallel, changes, str(tmp_path)):

        def flat(when, which, record=record):
            return torch.cat(record[when][which])

        # log_probs of the reference do not change the actor.
        for when in ("start", "moved", "restored", "reset"):
            assert torch.equal(flat(when, 0), flat(when, 2))
        assert torch.equal(flat("start", 0), flat("start", 1))
        assert torch.equal(flat("moved", 1), flat("start", 1))
        assert (flat("moved", 0) - flat("start", 0)).abs().max() > 1e-3
        assert torch.equal(flat("restored", 0), flat("moved", 0))
        assert torch.equal(flat("restored", 1), flat("moved", 1))
        assert torch.equal(flat("reset", 1), flat("moved", 0))
        assert record["stepped"]
        # One update per step: the weights are equal before the first one; the reference is reset before the third.
        assert [f["reference_kl"] for f in record["metrics"]] == pytest.approx(
            [0, record["metrics"][1]["reference_kl"], 0]
        )
        assert record["metrics"][1]["reference_kl"] > 1e-8


def passes(prompt, taken, n=16):
    """Return the rewards of a prompt's rollouts by the fake engine and pool."""
    return list(map(right, responses(3, prompt, n, 12, stream=taken)))


@pytest.mark.parametrize(("size", "parallel"), [(1, {}), (4, {"tensor": 2})])
def test_refills_with_carried_rollouts(worlds, directory, size, parallel):
    """Three siblings of two prompts often agree, so prompts are refilled until two are kept, at most three times.

    The learning rate counts the rollouts of the kept groups."""
    changes = {
        "rollout": {"prompts": 2, "n": 3, "refills": 2},
        "optim": {"lr": 1e-3, "lr_for_rollouts": 24},
    }
    results = worlds(size).run("steps:run_steps", directory, parallel, changes, 8, {})
    rounds = 0
    taken = 0
    waiting = []
    saw = set()
    recent_prompts = recent_kept = 0.0
    for step in range(8):
        pool = list(waiting)
        sampled = 0
        missing = 2 - len(waiting)
        first = rounds
        before = recent_prompts, recent_kept
        for _ in range(3):
            position = SourcePosition(recent_prompts=recent_prompts, recent_kept=recent_kept)
            count = round_size(missing, position, RolloutConfig(**changes["rollout"]))
            pool += [(rounds, p) for p in fakes.prompts(count, taken)]
            rounds = rounds + 1
            taken = taken + count
            sampled = sampled + count
            kept = [g for g in pool if 0 < sum(passes(g[1], g[0], 3)) < 3]
            missing = 2 - len(kept)
            recent_prompts = 0.5 * before[0] + sampled
            recent_kept = 0.5 * before[1] + len(kept) - len(waiting)
            if missing <= 0:
                break
        waiting = kept[2:]
        closed = [g for g in pool if g not in waiting]
        saw |= {("rounds", rounds - first), ("waiting", len(waiting)), ("sampled", sampled)}
        for metrics, _, _ in results:
            f = metrics[step]
            assert f["prompts_sampled"] == sampled
            assert f["rounds"] == rounds - first
            assert f["surplus_groups"] == len(waiting)
            assert f["kept_share"] == pytest.approx(len(kept[:2]) / len(closed))
            assert f["rollouts"] == 3 * len(closed)
            assert f["updates"] == (1 if kept else 0)
            assert f["lr"] == pytest.approx(1e-3 * math.sqrt(3 * len(kept[:2]) / 24))
    assert len(saw) >= 6  # more than one round, and a group that waited


def test_cut_off_responses_without_loss(worlds, directory):
    """With algo.overlong_filter, responses that were cut off are not trained on; metrics still count them."""
    for on in (False, True):
        changes = {"rollout": {"prompts": 3, "n": 16}, "algo": {"overlong_filter": on}}
        ((metrics, _, _),) = worlds(1).run("steps:run_steps", directory, {}, changes, 1, {})
        lengths = []
        for prompt in fakes.prompts(3):
            rewards = passes(prompt, 0)
            if 0 < sum(rewards) < 16:
                rows = responses(3, prompt, 16, 12)
                lengths += [len(row) for row in rows if row[-1] == fakes.STOP or not on]
        assert metrics[0]["trained_tokens"] == sum(lengths)
        assert metrics[0]["rollouts"] == 48


def test_shaping_reaches_the_advantages_and_not_the_selection(worlds, directory):
    shaping = {"overlong_tokens": 6, "cosine_coef": 1.0, "repetition_ngram": 1}
    ((plain, _, _a),) = worlds(1).run("steps:run_steps", directory, {}, SMALL, 1, {})
    ((shaped, _, _b),) = worlds(1).run("steps:run_steps", directory, {}, SMALL | {"shaping": shaping}, 1, {})
    assert [shaped[0][k] for k in ("reward", "kept_share", "rollouts")] == [
        plain[0][k] for k in ("reward", "kept_share", "rollouts")
    ]
    total = 0.0
    for prompt in fakes.prompts(3):
        for row in responses(3, prompt, 16, 12):
            t = len(row)
            total += right(row) * (1 - 0.5 + 0.25 * (1 + math.cos(math.pi * t / 12))) - max(0, t - 6) / 6
            total -= 0.001 * (t - len(set(row)))
    assert shaped[0]["shaped_reward"] == pytest.approx(total / 48, rel=1e-5)
    assert shaped[0]["grad_norm"] != plain[0]["grad_norm"]
