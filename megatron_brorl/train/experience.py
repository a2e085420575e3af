"""From the rows of kept groups to what can be trained on: with prompts, old log-probabilities and advantages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_brorl.train.worker import Worker
from megatron_brorl.types import Experience, OpenGroup, Row


def make_experience(
    rows: Sequence[Row],
    groups: Sequence[OpenGroup],
    advantages: Tensor,
    worker: Worker,
    temperature: float,
    source: str,
    updates: int,
) -> Experience:
    """Experience of this replica's rows, in their order; advantages [groups, N] of the whole step.

    source: "actor" recomputes the old log-probabilities with the trainer where it will move before it has used them
    (updates > 1); with one update they are the current ones. "rollout" takes the engine's.
    """
    ids = {g: torch.tensor(groups[g].prompt.token_ids, dtype=torch.int64) for g in {row.group for row in rows}}
    prompts = tuple(ids[row.group] for row in rows)
    responses = tuple(row.rollout.token_ids for row in rows)
    rollout_log_probs = tuple(row.rollout.log_probs for row in rows)
    old = None
    if source == "rollout":
        old = rollout_log_probs
    elif updates > 1:
        old = tuple(worker.log_probs(prompts, responses, temperature))
    return Experience(
        prompts=prompts,
        responses=responses,
        rollout_log_probs=rollout_log_probs,
        old_log_probs=old,
        advantages=advantages[[row.group for row in rows], [row.rollout.index for row in rows]],
    )
