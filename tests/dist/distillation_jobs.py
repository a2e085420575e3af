"""Advantages and gradients of on-policy distillation."""

from __future__ import annotations

from typing import Any

import torch
from dist.jobs import make_worker
from dist.ppo_jobs import scored

from megatron_brorl.config.schema import AlgoConfig
from megatron_brorl.models.weights import names
from megatron_brorl.models.weights.stream import make_buckets, stream
from megatron_brorl.train.experience import make_experience
from megatron_brorl.train.models import TrainingModels
from megatron_brorl.train.update import ActorLoss
from megatron_brorl.types import Prompt, PromptGroup, Rollout, ScoredRollout


def advantages(
    _rank: int, student: str, teacher: str, parallel: dict[str, Any], algo: dict[str, Any], temperature: float
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return the advantages of this replica's 24 rollouts by their ids, and the metrics."""
    actor, other = (make_worker(directory, parallel, offload=True) for directory in (student, teacher))
    models = TrainingModels(actor, teacher=other)
    models.offload()
    assert not any(p.untyped_storage().nbytes() for p in other.actor.parameters())
    grid = actor.grid
    groups, rollouts, table = scored(0)
    own = rollouts[24 * grid.dp_rank // grid.dp_size : 24 * (grid.dp_rank + 1) // grid.dp_size]
    config = AlgoConfig(dynamic_sampling=False, **algo)
    _, experience, metrics = make_experience(own, groups, table, models, config, temperature)
    return dict(zip(experience.ids, experience.advantages, strict=True)), metrics


def expected_gradient(
    _rank: int, student: str, teacher: str, prefixes: list[list[int]], probabilities: torch.Tensor, coef: float
) -> dict[str, torch.Tensor]:
    """Return sum_x pi(x) d loss(x) / d theta over prefixes and all next tokens x, by Hugging Face name in float64.

    probabilities: pi [prefixes, V], with which the loss of each token is weighted.
    """
    worker, other = (make_worker(directory, {}, dtype=torch.float64) for directory in (student, teacher))
    groups = [PromptGroup(Prompt(str(i), "", tuple(p), None, "none"), 0, i) for i, p in enumerate(prefixes)]
    rollouts = [
        ScoredRollout(g, Rollout(x, torch.tensor([x]), probabilities[g, x].log().float()[None], "stop"), 0.0, False)
        for g in range(len(prefixes))
        for x in range(probabilities.shape[1])
    ]
    algo = AlgoConfig(dynamic_sampling=False, distill_coef=coef, is_cap=0.0)
    nothing = torch.zeros(probabilities.shape)
    _, experience, _ = make_experience(rollouts, groups, nothing, TrainingModels(worker, teacher=other), algo, 0.8)

    loss = ActorLoss(experience, algo, probabilities.flatten().tolist())
    worker._run(worker.micro_batches(experience.prompts, experience.responses), loss, worker._head(0.8))
    gradients = {name: p.grad for name, p in names.global_parameters(worker.actor).items()}
    buckets = make_buckets(names.entries(worker.shape, 1), 8)
    found = stream(buckets, worker.shape.kv_heads, gradients, worker.grid, torch.float64)
    return {name: tensor.clone() for name, tensor in found}
