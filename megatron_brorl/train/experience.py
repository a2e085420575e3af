"""From the rows of kept groups to what can be trained on: prompts, log-probabilities, values and advantages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_brorl.config import AlgoConfig
from megatron_brorl.train.advantages import of_tokens
from megatron_brorl.train.worker import CriticWorker, Worker
from megatron_brorl.types import Experience, OpenGroup, Row


def make_experience(
    rows: Sequence[Row],
    groups: Sequence[OpenGroup],
    earned: Tensor,
    worker: Worker,
    critic: CriticWorker | None,
    algo: AlgoConfig,
    temperature: float,
) -> tuple[Experience, dict[str, float]]:
    """Experience of this replica's rows, in their order, and figures that are the same on every rank; a collective.

    earned: [groups, N] of the whole step (advantages.of_rollouts). Old log-probabilities are recomputed with the actor
    (algo.old_log_probs) where it will move before it has used them; with one update they are the current ones.
    """
    ids = {g: torch.tensor(groups[g].prompt.token_ids, dtype=torch.int64) for g in {row.group for row in rows}}
    prompts = tuple(ids[row.group] for row in rows)
    responses = tuple(row.rollout.token_ids for row in rows)
    rollout_log_probs = tuple(row.rollout.log_probs for row in rows)
    old = None
    if algo.old_log_probs == "rollout":
        old = rollout_log_probs
    elif algo.mini_batches * algo.epochs > 1:
        old = tuple(worker.log_probs(prompts, responses, temperature))
    values = tuple(critic.values(prompts, responses)) if critic else None
    own = earned[[row.group for row in rows], [row.rollout.index for row in rows]]
    credit = of_tokens(own, [len(r) for r in responses], values, algo, worker.ops, worker.grid.groups.dp)
    experience = Experience(
        prompts=prompts,
        responses=responses,
        rollout_log_probs=rollout_log_probs,
        old_log_probs=old,
        advantages=credit.advantages,
        values=values,
        returns=credit.returns,
    )
    return experience, credit.figures
