"""A step of actor and critic on given rollouts with tokens of an environment, in any layout."""

from __future__ import annotations

from typing import Any

import torch
from dist.jobs import grid_of
from dist.ppo_jobs import TEMPERATURE

from megatron_brorl.config.schema import AlgoConfig, OptimConfig, ReferenceConfig
from megatron_brorl.families.shape import read_shape
from megatron_brorl.ops.backend import backend
from megatron_brorl.parallel.balance import CostModel
from megatron_brorl.rollout.sampler import deal
from megatron_brorl.train.experience import make_experience, rollout_advantages
from megatron_brorl.train.groups import gather_outcomes, mini_batches, select_groups
from megatron_brorl.train.models import CriticWorker, TrainingModels
from megatron_brorl.train.redistribute import assign_replicas, send_to_replicas
from megatron_brorl.train.reference import ReferencePolicy
from megatron_brorl.train.update import update_critic, update_policy
from megatron_brorl.train.worker import StageOptions, Worker
from megatron_brorl.types import Experience, PromptGroup, ScoredRollout


def step(
    _rank: int,
    actor: str,
    other: str,
    parallel: dict[str, Any],
    ops: str,
    algo: AlgoConfig,
    head: torch.Tensor,
    groups: list[PromptGroup],
    scored: list[ScoredRollout],
) -> tuple[list[ScoredRollout], Experience, dict[str, float]]:
    """Exchange the rollouts and take one update; return the rollouts of this replica, their experience and metrics.

    actor, other: directories of the actor and of the reference policy, which is also the teacher. head: weights [1, H]
    of the critic's value head; its other weights are those of the actor.
    """
    grid = grid_of(**parallel)
    shape = read_shape(actor)
    stage = StageOptions(tokens_per_micro_batch=120, ops=backend(ops, torch.device("cpu")))
    optim = OptimConfig(lr=1e-3)
    worker = Worker(shape, grid, stage, optim)
    worker.load_hf(other)
    reference = ReferencePolicy(worker, ReferenceConfig()) if algo.kl_coef else None
    worker.load_hf(actor)
    critic = teacher = None
    if algo.advantage == "gae":
        critic = CriticWorker(shape, grid, stage, optim)
        critic.load_hf(actor)
        if grid.last_stage:
            critic.critic.output_layer.weight.data.copy_(head)
    if algo.distill_coef:
        teacher = Worker(shape, grid, stage, None)
        teacher.load_hf(other)

    n = 1 + max(r.rollout.index for r in scored)
    slots = [(r.group, r.rollout.index) for r in scored]
    held = set(deal(slots, [0] * grid.world_size)[grid.rank])
    own = [r for r, slot in zip(scored, slots, strict=True) if slot in held]
    outcomes = select_groups(gather_outcomes(own, len(groups), n))
    lengths = [len(g.prompt.token_ids) for g in groups]
    replica, _ = assign_replicas(outcomes, lengths, algo, CostModel(1e-3, 120, True), grid.dp_size)
    received, _ = send_to_replicas(own, outcomes, replica, grid)
    advantages = rollout_advantages(outcomes, groups, algo, stage.ops)
    models = TrainingModels(worker, critic, reference, teacher)
    rows, experience, metrics = make_experience(received, groups, advantages, models, algo, TEMPERATURE)
    batches = mini_batches(rows, outcomes.kept, 1, "prompts")
    if critic:
        metrics |= update_critic(critic, experience, batches, 0.0, optim, 0)
    metrics |= update_policy(worker, experience, batches, algo, optim, TEMPERATURE, 0)
    return received, experience, metrics
