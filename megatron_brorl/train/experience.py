"""From the rollouts of kept groups to what can be trained on: prompts, log-probabilities, values and advantages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from megatron_brorl.algo.kl import kl_estimate
from megatron_brorl.algo.mismatch import mismatch_mask
from megatron_brorl.config.schema import AlgoConfig
from megatron_brorl.parallel import collectives
from megatron_brorl.train.advantages import kl_in_reward, of_tokens
from megatron_brorl.train.models import TrainingModels
from megatron_brorl.train.nonfinite import finite_rows, log_rows
from megatron_brorl.train.worker import Worker
from megatron_brorl.types import Experience, OpenGroup, ScoredRollout

Rows = tuple[Tensor, ...]  # [G] of each row


def make_experience(
    rollouts: Sequence[ScoredRollout],
    groups: Sequence[OpenGroup],
    group_advantages: Tensor,
    models: TrainingModels,
    algo: AlgoConfig,
    temperature: float,
) -> tuple[list[ScoredRollout], Experience, dict[str, float]]:
    """Those of this replica's rollouts that are finite, their experience, and metrics, the same on every rank.

    A rollout is left out, and counted, where a log-probability or value of it is NaN or infinite (train.nonfinite). A
    collective. group_advantages: [groups, N] of the whole step (advantages.of_rollouts).
    """
    actor = models.actor
    # One tensor per prompt, shared by its siblings, by which packing finds them at little cost.
    prompt_of = {g: torch.tensor(groups[g].prompt.token_ids, dtype=torch.int64) for g in {r.group for r in rollouts}}
    prompts = tuple(prompt_of[r.group] for r in rollouts)
    responses = tuple(r.rollout.token_ids for r in rollouts)
    sampled = tuple(r.rollout.log_probs for r in rollouts)

    # The old policy: the engine's numbers, the actor's, or none: a single update starts at a ratio of 1.
    old = sampled if algo.old_log_probs == "rollout" else None
    if old is None and _needs_old(algo):
        old = tuple(actor.log_probs(prompts, responses, temperature))
    # Reference and critic, where the recipe has them. All of these are collectives of a replica.
    reference = tuple(models.reference.log_probs(prompts, responses, temperature)) if models.reference else None
    values = tuple(models.critic.values(prompts, responses)) if models.critic else None

    # Before anything is computed over rows: one NaN in a moment or a mean would reach all of them.
    known = [column for column in (sampled, old, reference, values) if column is not None]
    # Found over all ranks of the replica, which must go on with the same rows.
    finite = finite_rows(known, actor.grid)
    ids = tuple(f"{groups[r.group].prompt.id}/{r.rollout.index}" for r in rollouts)
    broken = [row for row, fine in enumerate(finite) if not fine]
    log_rows("left out of the step, log-probabilities or values are not finite", broken, ids, actor.grid)
    ids, rollouts, prompts, responses, sampled = (
        _those(x, finite) for x in (ids, rollouts, prompts, responses, sampled)
    )
    old, reference, values = (None if x is None else _those(x, finite) for x in (old, reference, values))
    counts = {"finite_rows": float(sum(finite)), "nonfinite_rows": float(len(finite) - sum(finite))}

    kl, mask, metrics = None, None, collectives.all_reduce_sum(counts, actor.grid.groups.dp)
    if kl_in_reward(algo) and old is not None and reference is not None:
        kl = tuple(kl_estimate(o - r, algo.kl_estimator) for o, r in zip(old, reference, strict=True))
        metrics["reference_kl"] = _token_mean(kl, actor)

    # A mask, not shorter rows: what comes later in a response still attends to these tokens.
    if algo.mismatch_mask != "off" and old is not None:
        bounds = algo.mismatch_mask, *algo.mismatch_bounds
        mask = tuple(mismatch_mask(o, s, *bounds) for o, s in zip(old, sampled, strict=True))
        metrics["masked_share"] = 1 - _token_mean(mask, actor)

    # By group and sibling: baselines have counted the rows that were left out here.
    own = group_advantages[[r.group for r in rollouts], [r.rollout.index for r in rollouts]]
    lengths = [len(r) for r in responses]
    credit = of_tokens(own, lengths, values, kl, algo, actor.options.ops, actor.grid.groups.dp)

    # The boost comes after whitening, which would rescale it and take its mean away.
    advantages = credit.advantages
    if algo.correct_boost:
        boosts = (algo.correct_boost if r.right else 0.0 for r in rollouts)
        advantages = tuple(a + boost for a, boost in zip(advantages, boosts, strict=True))

    experience = Experience(
        prompts=prompts,
        responses=responses,
        rollout_log_probs=sampled,
        old_log_probs=old,
        advantages=advantages,
        values=values,
        returns=credit.returns,
        reference_log_probs=reference,
        mask=mask,
        ids=ids,
    )
    return list(rollouts), experience, metrics | credit.metrics


def token_gain(actor: Worker, experience: Experience) -> float:
    """Tokens of plain streams over tokens that the actor computed, over all replicas; a collective."""
    tokens = collectives.all_reduce_sum(actor.tokens(experience.prompts, experience.responses), actor.grid.groups.dp)
    return tokens["plain"] / (tokens["computed"] or 1.0) if tokens["plain"] else 1.0


def _those(column: Sequence[Any], chosen: Sequence[bool]) -> tuple[Any, ...]:
    return tuple(compress(column, chosen))


def _needs_old(algo: AlgoConfig) -> bool:
    """Whether the actor's log-probabilities are asked for before its first update, or after it has moved."""
    return algo.mini_batches * algo.epochs > 1 or algo.mismatch_mask != "off" or kl_in_reward(algo)


def _token_mean(per_row: Rows, worker: Worker) -> float:
    own = {"sum": float(sum(x.double().sum() for x in per_row)), "tokens": float(sum(map(len, per_row)))}
    found = collectives.all_reduce_sum(own, worker.grid.groups.dp)
    return found["sum"] / found["tokens"] if found["tokens"] else float("nan")
