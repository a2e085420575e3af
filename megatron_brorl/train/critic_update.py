"""The critic's update: the same mini-batches as the actor's, the clipped value loss, and its metrics."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_brorl.config.schema import CriticConfig, OptimConfig
from megatron_brorl.ops.backend import Backend
from megatron_brorl.parallel import collectives
from megatron_brorl.parallel.batch import Packed
from megatron_brorl.train.critic_worker import CriticWorker
from megatron_brorl.train.finite import train_on_finite
from megatron_brorl.train.learning_rate import learning_rate
from megatron_brorl.train.worker import LossFunction, Update
from megatron_brorl.types import Experience

_SUMS = ("loss", "clipped", "tokens")  # of ops.reference.ValueLoss


def critic_optim(critic: CriticConfig, optim: OptimConfig) -> OptimConfig:
    """The critic's optimizer: that of [optim] at the rates of [critic]."""
    return replace(optim, lr=critic.lr, warmup_steps=critic.lr_warmup_steps)


def update_critic(
    critic: CriticWorker,
    experience: Experience,
    mini_batches: list[list[int]],
    clip: float,
    optim: OptimConfig,
    first_update: int,
) -> dict[str, float]:
    """One optimizer step per mini-batch; returns their metrics, the same on every rank.

    mini_batches: this rank's rows of each, as many as on every rank. clip: config key critic.clip. first_update: the
    critic's optimizer steps taken before. "critic_updates" counts those taken here. value_loss is the mean over steps
    of the token mean, value_clipped the share of tokens whose gradient the clipping removed. critic_nonfinite_rows are
    those that had to be left out of an update, and of those after it, because the critic's values of them are not
    finite.
    """
    totals, norms, taken, lr = dict.fromkeys(_SUMS, 0.0), [], 0, 0.0
    # Rows found not finite: left out of every later mini-batch too, since epochs bring them again.
    broken: set[int] = set()

    # What tells a row that is not finite from the others.
    def score(rows: list[int]) -> list[Tensor]:
        part = experience.take(rows)
        return critic.values(part.prompts, part.responses)

    # Every rank takes every turn, also without a row of its own: a step is a collective.
    for rows in mini_batches:
        # Only optimizer steps that were taken move the schedule.
        rate = learning_rate(optim, first_update + taken)
        attempt = partial(_attempt, critic, experience, clip, rate)
        done, left_out = train_on_finite(
            [r for r in rows if r not in broken], attempt, score, critic.grid, experience.ids
        )
        broken |= set(left_out)

        # Sums over mini-batches, of which the metrics are means.
        if done is None:
            continue  # every rank's share of this mini-batch was dropped
        update, found = done
        totals = {key: totals[key] + found[key] for key in totals}
        norms.append(update.grad_norm)
        # A skipped update leaves weights and schedule where they are.
        if update.applied:
            taken, lr = taken + 1, rate

    # Where no step was taken means are 0.
    steps = max(len(norms), 1)
    return {
        "value_loss": totals["loss"] / steps,
        # A share of tokens, not a mean over steps.
        "value_clipped": totals["clipped"] / (totals["tokens"] or 1.0),
        "critic_grad_norm": sum(norms) / steps,
        "critic_updates": float(taken),
        "critic_updates_skipped": float(len(norms) - taken),
        "critic_lr": lr,
        # A replica's ranks have the same rows, so only replicas are added up.
        "critic_nonfinite_rows": collectives.all_reduce_sum({"rows": float(len(broken))}, critic.grid.groups.dp)[
            "rows"
        ],
    }


def _attempt(
    critic: CriticWorker, experience: Experience, clip: float, lr: float, rows: list[int]
) -> tuple[Update, dict[str, float]] | None:
    """One optimizer step on these rows with its sums over all ranks; None where no replica has a token."""
    part = experience.take(rows)
    own_tokens = float(sum(len(r) for r in part.responses))
    tokens = collectives.all_reduce_sum({"tokens": own_tokens}, critic.grid.groups.dp)["tokens"]
    if not tokens:
        return None
    loss = _loss_function(part, clip or math.inf, 1 / tokens, critic.options.ops)
    update, values = critic.train(part.prompts, part.responses, loss, lr)
    own = {key: sum((v.sums[key] for v in values), 0.0) for key in _SUMS}
    return update, collectives.all_reduce_sum(own, critic.grid.groups.pp, critic.grid.groups.dp_cp)


def _loss_function(part: Experience, clip: float, weight: float, ops: Backend) -> LossFunction:
    if part.values is None or part.returns is None:
        raise ValueError("update_critic: the experience has no values and returns")
    old, returns = part.values, part.returns

    def loss(batch: Packed, values: Tensor) -> tuple[Tensor, Any]:
        weights = torch.full_like(values, weight)
        result = ops.value_loss(values, batch.gather(old).to(values), batch.gather(returns).to(values), weights, clip)
        return result.loss, replace(result, loss=result.loss.detach())

    return loss
