"""Advantages and gradients of on-policy distillation."""

from __future__ import annotations

from typing import Any

import torch
from dist.jobs import make_worker
from dist.ppo_jobs import TEMPERATURE, scored

from megatron_brorl.config.schema import AlgoConfig
from megatron_brorl.models.weights import names
from megatron_brorl.models.weights.stream import make_buckets, stream
from megatron_brorl.train.experience import make_experience
from megatron_brorl.train.models import TrainingModels
from megatron_brorl.train.update import ActorLoss
from megatron_brorl.types import Prompt, PromptGroup, TrainingRollout


def advantages(
    _rank: int, folders: list[str], parallel: dict[str, Any], algo: AlgoConfig
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return the advantages of this replica's part of 24 rollouts by their ids, and metrics. folders: of both models"""
    actor, teacher = (make_worker(folder, parallel, offload=True) for folder in folders)
    models = TrainingModels(actor, teacher=teacher)
    models.offload()
    assert not any(p.untyped_storage().nbytes() for p in teacher.actor.parameters())
    groups, rollouts, table = scored(0)
    own = rollouts[24 * actor.grid.dp_rank // actor.grid.dp_size : 24 * (actor.grid.dp_rank + 1) // actor.grid.dp_size]
    experience, metrics = make_experience(own, groups, table, models, algo, TEMPERATURE)
    return dict(zip(experience.ids, experience.advantages, strict=True)), metrics


def expected_gradient(
    _rank: int, folders: list[str], prefixes: list[list[int]], pi: torch.Tensor, algo: AlgoConfig
) -> dict[str, torch.Tensor]:
    """Return the sum over prefixes and next tokens x of pi(x) times the gradient of the loss of x, by name.

    pi: [prefixes, V], the student's probabilities.
    """
    worker, teacher = (make_worker(folder, {}, dtype=torch.float64) for folder in folders)
    groups = [PromptGroup(Prompt(str(i), "", tuple(p), None, "none"), 0, i) for i, p in enumerate(prefixes)]
    tokens = [(g, x) for g in range(len(prefixes)) for x in range(pi.shape[1])]
    rollouts = [TrainingRollout(g, x, torch.tensor([x]), pi[g, x, None].log().float(), False) for g, x in tokens]
    models = TrainingModels(worker, teacher=teacher)
    experience, _ = make_experience(rollouts, groups, torch.zeros(pi.shape), models, algo, TEMPERATURE)

    loss = ActorLoss(experience, algo, pi.flatten().tolist())
    worker._run(worker.micro_batches(experience.prompts, experience.responses), loss, worker.head(TEMPERATURE))
    gradients = {name: p.grad for name, p in names.global_parameters(worker.actor).items()}
    buckets = make_buckets(names.entries(worker.shape, 1), 8)
    return {n: x.clone() for n, x in stream(buckets, worker.shape.kv_heads, gradients, worker.grid, torch.float64)}
