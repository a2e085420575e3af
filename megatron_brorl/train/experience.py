"""From scored groups to rows that can be trained on: old log-probabilities and whitened advantages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_brorl.algo.advantage import Moments, group_baseline, merge, moments, whiten
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.train.worker import Worker
from megatron_brorl.types import Experience, ScoredGroup


def make_experience(
    groups: Sequence[ScoredGroup], worker: Worker, temperature: float, source: str, updates: int
) -> Experience:
    """Rows of this data-parallel rank's groups.

    source: "actor" recomputes the old log-probabilities with the trainer where it will move before it has used them
    (updates > 1), "rollout" takes the engine's.
    """
    rollouts = [r for g in groups for r in g.group.rollouts]
    prompts = []
    for g in groups:
        ids = torch.tensor(g.group.prompt.token_ids, dtype=torch.int64)
        prompts.extend([ids] * len(g.group.rollouts))
    responses = tuple(r.token_ids for r in rollouts)
    rollout_log_probs = tuple(r.log_probs for r in rollouts)
    old = None
    if source == "rollout":
        old = rollout_log_probs
    elif updates > 1:
        old = tuple(worker.log_probs(prompts, responses, temperature))
    rewards = torch.cat([g.rewards for g in groups]) if groups else torch.zeros(0)
    return Experience(
        prompts=tuple(prompts),
        responses=responses,
        rollout_log_probs=rollout_log_probs,
        old_log_probs=old,
        advantages=_advantages(rewards, [len(g.rewards) for g in groups], worker),
    )


def _advantages(rewards: Tensor, sizes: list[int], worker: Worker) -> Tensor:
    """REINFORCE++-baseline: rewards [B] of groups minus the group's mean, whitened over the global batch."""
    if worker.ops == "fused":
        from megatron_brorl.ops import fused_advantages

        starts = torch.tensor([0, *sizes]).cumsum(0)
        centred = fused_advantages.group_advantages(rewards, starts)
        batch = _over_ranks(fused_advantages.to_moments(fused_advantages.moments(centred)), worker.grid)
        return fused_advantages.whiten_(centred, batch.mean, batch.std)
    centred = torch.cat([group_baseline(x) for x in rewards.split(sizes)]) if sizes else rewards
    return whiten(centred, _over_ranks(moments(centred), worker.grid))


def _over_ranks(own: Moments, grid: Grid) -> Moments:
    """Moments of the global batch, merged in rank order on every rank."""
    parts = [Moments(0.0, 0.0, 0.0)] * grid.data
    dist.all_gather_object(parts, own, group=grid.groups.dp)
    return merge(parts)
