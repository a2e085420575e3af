"""From the rows of kept groups to what can be trained on: prompts, log-probabilities, values and advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from megatron_brorl.algo.kl import kl_estimate
from megatron_brorl.algo.mismatch import mismatch_mask
from megatron_brorl.config.schema import AlgoConfig
from megatron_brorl.parallel import collectives
from megatron_brorl.train.advantages import kl_in_reward, of_tokens
from megatron_brorl.train.finite import finite_rows
from megatron_brorl.train.reference import Reference
from megatron_brorl.train.worker import CriticWorker, Worker
from megatron_brorl.types import CORRECT, Experience, OpenGroup, Row

Rows = tuple[Tensor, ...]  # [G] of each row


@dataclass(frozen=True)
class Models:
    """What a step asks about its tokens."""

    actor: Worker
    critic: CriticWorker | None = None  # of algo.advantage = "gae"
    reference: Reference | None = None  # of algo.kl_coef


def make_experience(
    rows: Sequence[Row],
    groups: Sequence[OpenGroup],
    earned: Tensor,
    models: Models,
    algo: AlgoConfig,
    temperature: float,
    weights: Tensor | None = None,
) -> tuple[list[Row], Experience, dict[str, float]]:
    """Those of this replica's rows that are finite, their experience, and figures that are the same on every rank.

    A row is left out, and counted, where a log-probability or value of it is NaN or infinite (train.finite). A
    collective. earned: [groups, N] of the whole step (advantages.of_rollouts). weights: [groups, N] likewise
    (adaptive.of_rounds).
    """
    actor = models.actor
    ids = {g: torch.tensor(groups[g].prompt.token_ids, dtype=torch.int64) for g in {row.group for row in rows}}
    prompts = tuple(ids[row.group] for row in rows)
    responses = tuple(row.rollout.token_ids for row in rows)
    sampled = tuple(row.rollout.log_probs for row in rows)
    old = sampled if algo.old_log_probs == "rollout" else None
    if old is None and _needs_old(algo):
        old = tuple(actor.log_probs(prompts, responses, temperature))
    reference = tuple(models.reference.log_probs(prompts, responses, temperature)) if models.reference else None
    values = tuple(models.critic.values(prompts, responses)) if models.critic else None

    # Before anything is computed over rows: one NaN in a moment or a mean would reach all of them.
    known = [column for column in (sampled, old, reference, values) if column is not None]
    finite = finite_rows(known, actor.grid)
    rows, prompts, responses, sampled = (_those(x, finite) for x in (rows, prompts, responses, sampled))
    old, reference, values = (None if x is None else _those(x, finite) for x in (old, reference, values))
    counts = {"finite_rows": float(sum(finite)), "nonfinite_rows": float(len(finite) - sum(finite))}

    kl, mask, figures = None, None, collectives.all_reduce_sum(counts, actor.grid.groups.dp)
    if kl_in_reward(algo) and old is not None and reference is not None:
        kl = tuple(kl_estimate(o - r, algo.kl_estimator) for o, r in zip(old, reference, strict=True))
        figures["reference_kl"] = _token_mean(kl, actor)
    if algo.mismatch_mask != "off" and old is not None:
        bounds = algo.mismatch_mask, algo.mismatch_low, algo.mismatch_high
        mask = tuple(mismatch_mask(o, s, *bounds) for o, s in zip(old, sampled, strict=True))
        figures["masked_share"] = 1 - _token_mean(mask, actor)
    own = earned[[row.group for row in rows], [row.rollout.index for row in rows]]
    lengths = [len(r) for r in responses]
    credit = of_tokens(own, lengths, values, kl, algo, actor.options.ops, actor.grid.groups.dp)
    advantages = credit.advantages
    if algo.correct_boost:
        boosts = (algo.correct_boost if row.reward >= CORRECT else 0.0 for row in rows)
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
        weights=None if weights is None else tuple(float(weights[row.group, row.rollout.index]) for row in rows),
        mask=mask,
    )
    return list(rows), experience, figures | credit.figures


def _those(column: Sequence[Any], chosen: Sequence[bool]) -> tuple[Any, ...]:
    return tuple(compress(column, chosen))


def _needs_old(algo: AlgoConfig) -> bool:
    """Whether the actor's log-probabilities are asked for before its first update, or after it has moved."""
    return algo.mini_batches * algo.epochs > 1 or algo.mismatch_mask != "off" or kl_in_reward(algo)


def _token_mean(per_row: Rows, worker: Worker) -> float:
    own = {"sum": float(sum(x.double().sum() for x in per_row)), "tokens": float(sum(map(len, per_row)))}
    found = collectives.all_reduce_sum(own, worker.grid.groups.dp)
    return found["sum"] / found["tokens"] if found["tokens"] else float("nan")
