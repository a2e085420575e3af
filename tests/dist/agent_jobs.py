"""A step on given rollouts of agents, which have several sequences, in any layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tiny
import torch
from dist.jobs import grid_of

from megatron_brorl.config.schema import AlgoConfig, OptimConfig
from megatron_brorl.families.shape import read_shape
from megatron_brorl.ops.backend import backend
from megatron_brorl.train.experience import make_experience
from megatron_brorl.train.groups import choose_subset, gather_outcomes, mini_batches, select_groups
from megatron_brorl.train.models import TrainingModels
from megatron_brorl.train.redistribute import assign_replicas, cost_model, send_to_replicas
from megatron_brorl.train.update import update_policy
from megatron_brorl.train.worker import StageOptions, Worker
from megatron_brorl.types import Episode, Prompt, PromptGroup, Rollout, ScoredRollout

# Adam's eps well above float32 noise, so that layouts can be compared.
OPTIM = OptimConfig(lr=2e-3, clip_grad=0.5, weight_decay=0.1, eps=1e-3)
GROUPS, N = 3, 4


def scored() -> list[ScoredRollout]:
    """Return rollouts of one to three sequences, each with one to three calls. Some begin with the same prompt."""
    g = torch.Generator().manual_seed(3)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=g))

    rollouts = []
    for group in range(GROUPS):
        first = torch.randint(0, tiny.VOCAB, (draw(5, 9),), generator=g)
        for sibling in range(N):
            ids: list[torch.Tensor] = []
            sampled: list[int] = []
            starts = []
            for sequence in range(1 + (group + sibling) % 3):
                starts.append(sum(map(len, ids)))
                for call in range(draw(1, 4)):
                    shared = sequence < 2 and not call
                    context = first if shared else torch.randint(0, tiny.VOCAB, (draw(1, 6),), generator=g)
                    new = torch.randint(0, tiny.VOCAB, (draw(1, 7),), generator=g)
                    ids += [context, new]
                    sampled += [0] * len(context) + [1] * len(new)
            mask = torch.tensor(sampled, dtype=torch.bool)
            log_probs = (-5.0 + 0.4 * torch.randn(len(mask), generator=g)) * mask
            episode = Episode(mask, turns=len(ids) // 2, starts=tuple(starts))
            rollout = Rollout(sibling, torch.cat(ids), log_probs, "stop", ((0, len(mask)),), episode)
            rollouts.append(ScoredRollout(group, rollout, float(torch.rand(1, generator=g)), right=False))
    return rollouts


def step(
    rank: int, directory: str, parallel: dict[str, Any], options: dict[str, Any], algo: AlgoConfig
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Send the rollouts to their replicas, and take a step per mini-batch. Return metrics and the final weights."""
    grid = grid_of(**parallel)
    stage = {"tokens_per_micro_batch": 120, **options, "ops": backend("fused", torch.device("cpu"))}
    worker = Worker(read_shape(directory), grid, StageOptions(**stage), OPTIM)
    worker.load_hf(directory)
    own = scored()[rank :: grid.world_size]
    outcomes = select_groups(gather_outcomes(own, GROUPS, N))
    groups = [PromptGroup(Prompt(str(i), "", (1, 2), None, "none"), 0, i) for i in range(GROUPS)]
    subset = choose_subset(outcomes, algo)
    replica, _ = assign_replicas(outcomes, subset, [2] * GROUPS, algo, cost_model(worker), grid.dp_size)
    received, _ = send_to_replicas(own, outcomes, replica, grid)
    models = TrainingModels(worker, None, None, None)
    experience, metrics = make_experience(received, groups, outcomes.rewards, models, algo, 1.0)
    batches = mini_batches(experience.slots, outcomes.kept, algo.mini_batches, algo.mini_batch_of)
    metrics |= update_policy(worker, experience, batches, replace(algo), OPTIM, 1.0, 0)
    return metrics, {name: tensor.clone() for name, tensor in worker.hf_tensors()}
