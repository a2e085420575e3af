"""Steps of an actor and a critic on given rollouts, in any layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from dist.jobs import PROMPT_OF_ROW, make_worker, rows, share, streamed

from megatron_brorl.config.schema import AlgoConfig, OptimConfig, ReferenceConfig
from megatron_brorl.models.gpt import critic_body
from megatron_brorl.models.weights import names
from megatron_brorl.models.weights.stream import make_buckets, stream
from megatron_brorl.train.experience import make_experience
from megatron_brorl.train.groups import mini_batches
from megatron_brorl.train.models import CriticWorker, ReferencePolicy, TrainingModels
from megatron_brorl.train.update import update_critic, update_policy
from megatron_brorl.types import Prompt, PromptGroup, TrainingRollout

# Adam's eps well above float32 noise, so that layouts can be compared (see jobs.train_steps).
OPTIM = OptimConfig(lr=2e-3, clip_grad=0.5, weight_decay=0.1, eps=1e-3)
CRITIC_OPTIM = OptimConfig(lr=5e-3, clip_grad=0.5, weight_decay=0.1, eps=1e-3)
ALGO = AlgoConfig(
    advantage="gae",
    gamma=0.98,
    lam=0.9,
    mini_batches=2,
    epochs=2,
    dynamic_sampling=False,
    is_cap=1.5,
    kl_coef=0.05,
    kl_estimator="k2",
    entropy_coef=0.01,
    mismatch_mask="token",
)
# Without a critic: ratios, the mismatch and the aggregation are those of sequences, and the KL is in the reward.
GRPO = replace(ALGO, advantage="grpo", gamma=1.0, lam=1.0, kl_in="reward", kl_estimator="k1", distill_coef=0.1)
_OF_SEQUENCES = {"ratio": "sequence", "mismatch_mask": "sequence", "aggregation": "sequence_mean"}
SEQUENCES = replace(GRPO, eps_low=0.01, eps_high=0.01, **_OF_SEQUENCES)
STEPS = 2
CLIP = 0.05  # critic.clip
TEMPERATURE = 0.9


def batch(step: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[float]]:
    """Return prompts, responses, the engine's log-probs and rewards of a step's 24 rollouts."""
    prompts, responses = rows(10 + step)
    g = torch.Generator().manual_seed(step)
    # Single tokens and whole responses differ from the trainer by more than algo.mismatch_mask accepts.
    log_probs = [-5.0 + 0.5 * torch.randn(1, generator=g) + 0.4 * torch.randn(len(r), generator=g) for r in responses]
    rewards = torch.rand(24, generator=g)
    rewards[::5] = 1.0
    return prompts, responses, log_probs, rewards.tolist()


def turns(responses: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return which tokens of each response the model sampled: all, two of three or one of three, always the last."""
    return [torch.arange(-len(r), 0) % 3 >= i % 3 for i, r in enumerate(responses)]


def scored(step: int, environment: bool = False) -> tuple[list[PromptGroup], list[TrainingRollout], torch.Tensor]:
    """Return the groups of a step, its rollouts, and their rewards as advantages [groups, N]."""
    prompts, responses, log_probs, rewards = batch(step)
    prompt_ids = [tuple(prompts[PROMPT_OF_ROW.index(g)].tolist()) for g in range(4)]
    groups = [PromptGroup(Prompt(str(i), "", p, None, "exact"), round=step, index=i) for i, p in enumerate(prompt_ids)]
    rollouts = []
    advantages = torch.zeros(4, 11)
    for i, (group, sampled) in enumerate(zip(PROMPT_OF_ROW, turns(responses), strict=True)):
        sibling = i - PROMPT_OF_ROW.index(group)
        rollout = TrainingRollout(group, sibling, responses[i], log_probs[i], right=rewards[i] >= 0.99)
        if environment and not sampled.all():
            rollout = replace(rollout, log_probs=log_probs[i] * sampled, sampled=sampled)
        rollouts.append(rollout)
        advantages[group, sibling] = rewards[i]
    return groups, rollouts, advantages


def ppo(
    _rank: int, directory: str, parallel: dict[str, Any], options: dict[str, Any], algo: AlgoConfig, environment: bool
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the metrics of each step, with the trained positions, and the final weights of actor and critic."""
    worker = make_worker(directory, parallel, OPTIM, **options)
    critic = teacher = None
    if algo.advantage == "gae":
        critic = make_worker(directory, parallel, CRITIC_OPTIM, kind=CriticWorker, **options)
    if algo.distill_coef:
        teacher = make_worker(directory, parallel, **options)
    models = TrainingModels(worker, critic, ReferencePolicy(worker, ReferenceConfig()), teacher)
    metrics = []
    for step in range(STEPS):
        groups, rollouts, advantages = scored(step, environment)
        own_rows = share(rollouts, worker.grid)
        experience, step_metrics = make_experience(own_rows, groups, advantages, models, algo, TEMPERATURE)
        batches = mini_batches(experience.slots, range(4), algo.mini_batches, of="siblings") * algo.epochs
        first_update = len(batches) * step
        if critic:
            step_metrics |= update_critic(critic, experience, batches, CLIP, CRITIC_OPTIM, first_update=first_update)
        step_metrics |= update_policy(worker, experience, batches, algo, OPTIM, TEMPERATURE, first_update=first_update)
        positions = [tuple(mask.nonzero().flatten().tolist()) for mask in experience.mask or ()]
        metrics.append({**step_metrics, "trained": dict(zip(experience.ids, positions, strict=True))})
    return metrics, streamed(worker), critic_weights(critic) if critic else {}


def critic_weights(critic: CriticWorker) -> dict[str, torch.Tensor]:
    """Return the full weights by Hugging Face name and, on the last stage, the value head."""
    shape = critic_body(critic.shape)
    grid = critic.grid
    buckets = make_buckets(names.entries(shape, grid.pp_size), item_bytes=4)
    parameters = names.global_parameters(critic.critic)
    weights = {n: t.clone() for n, t in stream(buckets, shape.kv_heads, parameters, grid, torch.float32)}
    if grid.last_stage:
        weights["value_head"] = critic.critic.output_layer.weight.detach().clone()
    return weights
