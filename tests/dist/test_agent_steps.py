"""Steps on rollouts with several sequences, against a plain loop in float64 that computes one sequence at a time."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import tiny
import torch
from dist.jobs import make_worker, streamed
from dist.test_ppo import descend, optimizer
from dist.world import PP, TP

from megatron_brorl.config.schema import AlgoConfig, OptimConfig
from megatron_brorl.train.experience import make_experience
from megatron_brorl.train.groups import choose_subset, gather_outcomes, mini_batches, select_groups
from megatron_brorl.train.models import TrainingModels
from megatron_brorl.train.redistribute import assign_replicas, cost_model, send_to_replicas
from megatron_brorl.train.update import update_policy
from megatron_brorl.types import Episode, Prompt, PromptGroup, Rollout, ScoredRollout

pytestmark = pytest.mark.slow
# Adam's eps well above float32 noise, so that layouts can be compared.
OPTIM = OptimConfig(lr=2e-3, clip_grad=0.5, weight_decay=0.1, eps=1e-3)
GROUPS, N = 3, 4
COMMON = {"advantage": "grpo", "mini_batches": 2, "mini_batch_of": "siblings", "old_log_probs": "actor", "is_cap": 1.5}
ALGOS = {
    "token_mean": AlgoConfig(aggregation="token_mean", **COMMON),
    "sequence_mean": AlgoConfig(aggregation="sequence_mean", **COMMON),
    "fixed": AlgoConfig(aggregation="fixed", aggregation_tokens=20, **COMMON),
}
CASES = [  # ranks, layout, options, key of ALGOS
    *((1, {}, {}, name) for name in ALGOS),
    (2, {}, {}, "sequence_mean"),
    (2, PP, {"share_prompt": False}, "token_mean"),
    (2, TP, {}, "fixed"),
]


def scored() -> list[ScoredRollout]:
    """Return rollouts of one to three sequences, each with one to three calls. Some begin with the same prompt."""
    g = torch.Generator().manual_seed(3)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=g))

    rollouts = []
    for group in range(GROUPS):
        first_prompt = torch.randint(0, tiny.VOCAB, (draw(5, 9),), generator=g)
        for sibling in range(N):
            ids: list[torch.Tensor] = []
            sampled: list[int] = []
            starts = []
            for sequence in range(1 + (group + sibling) % 3):
                starts.append(sum(map(len, ids)))
                for call in range(draw(1, 4)):
                    shared = sequence < 2 and not call
                    context = first_prompt if shared else torch.randint(0, tiny.VOCAB, (draw(1, 6),), generator=g)
                    new = torch.randint(0, tiny.VOCAB, (draw(1, 7),), generator=g)
                    ids += [context, new]
                    sampled += [0] * len(context) + [1] * len(new)
            mask = torch.tensor(sampled, dtype=torch.bool)
            log_probs = (-5.0 + 0.4 * torch.randn(len(mask), generator=g)) * mask
            episode = Episode(mask, turns=len(ids) // 2, starts=tuple(starts))
            spans = ((0, len(mask)),)
            rollout = Rollout(sibling, torch.cat(ids), log_probs, "stop", spans, episode)
            rollouts.append(ScoredRollout(group, rollout, float(torch.rand(1, generator=g)), right=False))
    return rollouts


def step(
    rank: int, directory: str, parallel: dict[str, Any], options: dict[str, Any], algo: AlgoConfig
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Send the rollouts to their replicas, and take a step per mini-batch. Return metrics and the final weights."""
    worker = make_worker(directory, parallel, OPTIM, **options)
    grid = worker.grid
    own_rollouts = scored()[rank :: grid.world_size]
    outcomes = select_groups(gather_outcomes(own_rollouts, GROUPS, N))
    groups = [PromptGroup(Prompt(str(i), "", (1, 2), None, "none"), round=0, index=i) for i in range(GROUPS)]
    prompt_tokens = [2] * GROUPS
    subset = choose_subset(outcomes, algo)
    replica, _ = assign_replicas(outcomes, subset, prompt_tokens, algo, cost_model(worker), grid.dp_size)
    received, _ = send_to_replicas(own_rollouts, outcomes, replica, grid)
    models = TrainingModels(worker)
    experience, metrics = make_experience(received, groups, outcomes.rewards, models, algo, temperature=1.0)
    batches = mini_batches(experience.slots, outcomes.kept, algo.mini_batches, algo.mini_batch_of)
    metrics |= update_policy(worker, experience, batches, algo, OPTIM, temperature=1.0, first_update=0)
    return metrics, streamed(worker)


def loop(directory, algo):
    """Return the model directory, the mean metrics of both mini-batches, and the weights after them."""
    actor = tiny.make_model(directory, "qwen2", tied=True).double()
    adam = optimizer(actor, OPTIM)

    def log_probs(rollout):
        """Return the log-probabilities of the sampled tokens, by one pass per sequence."""
        parts = []
        for begin, end in pairwise((*rollout.episode.starts, len(rollout.token_ids))):
            ids, sampled = rollout.token_ids[begin:end], rollout.episode.sampled[begin:end]
            table = actor(ids[None]).logits[0, :-1].log_softmax(-1)
            parts.append(table.gather(-1, ids[1:, None])[:, 0][sampled[1:]])
        return torch.cat(parts)

    rows = scored()
    with torch.no_grad():
        old = [log_probs(r.rollout) for r in rows]
    metrics = {"loss": [], "grad_norm": []}
    for batch in range(2):
        members = [i for i, r in enumerate(rows) if r.rollout.index % 2 == batch]
        lengths = [int(rows[i].rollout.episode.sampled.sum()) for i in members]
        loss = torch.zeros(()).double()
        for i, length in zip(members, lengths, strict=True):
            rollout = rows[i].rollout
            current = log_probs(rollout)
            engine = rollout.log_probs[rollout.episode.sampled].double()
            ratio = (current - old[i]).exp()
            advantage = rows[i].reward
            weight = (old[i] - engine).exp().clamp(max=algo.is_cap)
            clipped = ratio.clamp(1 - algo.eps_low, 1 + algo.eps_high)
            total = (-weight * torch.minimum(ratio * advantage, clipped * advantage)).sum()
            divisors = {
                "token_mean": sum(lengths),
                "sequence_mean": len(members) * length,
                "fixed": len(members) * algo.aggregation_tokens,
            }
            loss = loss + total / divisors[algo.aggregation]
        metrics["loss"].append(loss.item())
        metrics["grad_norm"].append(descend(actor, adam, loss, OPTIM))
    return str(directory), {name: sum(values) / 2 for name, values in metrics.items()}, dict(actor.state_dict())


@pytest.fixture(scope="module")
def loops(tmp_path_factory):
    return cache(lambda name: loop(tmp_path_factory.mktemp("model"), ALGOS[name]))


@pytest.mark.parametrize(("size", "parallel", "options", "name"), CASES)
def test_steps_equal_a_plain_loop(worlds, loops, size, parallel, options, name):
    """A rollout counts once, whatever the number of its sequences."""
    directory, expected, weights = loops(name)
    assert any(len(r.rollout.episode.starts) == 3 for r in scored())
    for metrics, own_weights in worlds(size).run("test_agent_steps:step", directory, parallel, options, ALGOS[name]):
        assert {key: metrics[key] for key in expected} == pytest.approx(expected, rel=1e-6)
        assert metrics["trained_tokens"] == sum(int(r.rollout.episode.sampled.sum()) for r in scored())
        assert metrics["finite_rows"] == sum(len(r.rollout.episode.starts) for r in scored())
        for key, tensor in own_weights.items():
            assert (tensor - weights[key]).norm() <= 1e-5 * weights[key].norm(), key
