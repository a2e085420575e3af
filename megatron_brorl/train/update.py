"""The optimizer steps of one training step: first those of the critic, then those of the actor, on the same rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from megatron_brorl.algo import policy_loss as losses
from megatron_brorl.algo.policy_loss import PolicyLossSettings, token_weights
from megatron_brorl.config.schema import AlgoConfig, Config, CriticConfig, OptimConfig
from megatron_brorl.errors import StepError
from megatron_brorl.models.gpt import Head
from megatron_brorl.ops.backend import Backend
from megatron_brorl.ops.interface import compute_dtype
from megatron_brorl.parallel import collectives, cpu_bridge
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.parallel.packing import Packed
from megatron_brorl.tracking.timeline import count
from megatron_brorl.train.experience import log_rows
from megatron_brorl.train.learning_rate import learning_rate, optimizer_steps, scaled
from megatron_brorl.train.models import CriticWorker, TrainingModels
from megatron_brorl.train.state import RunState
from megatron_brorl.train.worker import LossFunction, OptimizerStep, Worker
from megatron_brorl.types import Experience

_VALUE_SUMS = ("loss", "clipped", "tokens")  # of ops.interface.ValueLoss

# The result of an optimizer step and its metrics over all ranks.
StepMetrics = tuple[OptimizerStep, dict[str, float]]


def update_models(
    models: TrainingModels,
    experience: Experience,
    batches: list[list[int]],
    trained: int,
    config: Config,
    state: RunState,
) -> dict[str, float]:
    """Take one optimizer step per batch of rows on the critic and then on the actor; return metrics. Collective.

    `state` counts the optimizer steps that were applied. trained: rollouts of all ranks that the step trains on. During
    critic.warmup_steps the actor is not updated.
    """
    metrics = {}
    steps = config.train.steps
    if models.critic:
        optim = critic_optim(config.critic, config.optim)
        total = optimizer_steps(config.algo, steps)
        clip = config.critic.clip
        metrics = update_critic(models.critic, experience, batches, clip, optim, state.critic_updates, total)
        # The actor's schedule has the training steps that are left after the critic's warm-up.
        steps -= config.critic.warmup_steps
        if state.critic_steps < config.critic.warmup_steps:
            batches = []

        # A step without a signal teaches the critic nothing, so it does not count towards the warm-up.
        state.critic_updates += int(metrics["critic_updates"])
        state.critic_steps += metrics["critic_updates"] > 0

    rollout = config.rollout
    optim = scaled(config.optim, trained)
    total = optimizer_steps(config.algo, steps)
    updated = update_policy(
        models.actor, experience, batches, config.algo, optim, rollout.temperature, state.updates, total
    )
    state.updates += int(updated["updates"])

    # After top-p or top-k, differences of log-probabilities do not show whether engine and trainer agree.
    if rollout.top_p < 1 or rollout.top_k:
        del updated["logprob_gap_mean"], updated["logprob_gap_max"]
    return metrics | updated


def critic_optim(critic: CriticConfig, optim: OptimConfig) -> OptimConfig:
    """Return the critic's optimizer: that of [optim] with the learning rate of [critic]."""
    return replace(optim, lr=critic.lr)


def update_policy(
    worker: Worker,
    experience: Experience,
    mini_batches: list[list[int]],
    algo: AlgoConfig,
    optim: OptimConfig,
    temperature: float,
    first_update: int,
    total_updates: int = 0,
) -> dict[str, float]:
    """Take one optimizer step per mini-batch on the actor; return metrics, the same on every rank.

    mini_batches: this rank's rows in each mini-batch, epoch by epoch; all ranks have equally many mini-batches.
    first_update: optimizer steps applied before. total_updates: optimizer steps of the run, see learning_rate. Metrics
    are token means over all mini-batches; logprob_gap_* are those of the first mini-batch that has rows, where the
    actor still has the weights that the engine sampled the newest tokens from.
    """

    def step(lr: float, indices: list[int]) -> StepMetrics | None:
        rows = experience.select(indices)
        # A unit of the loss is a rollout, which has several rows if it is an agent's. Without slots, it is a row.
        units: Sequence[Any] = rows.slots or range(len(rows))
        lengths: dict[Any, int] = Counter()
        for unit, tokens in zip(units, rows.sampled_tokens(), strict=True):
            lengths[unit] += tokens
        counts = {"tokens": float(sum(lengths.values())), "sequences": float(sum(n > 0 for n in lengths.values()))}
        if rows.weights:
            factors = dict(zip(units, rows.weights, strict=True)).values()  # one per unit
            counts = {"tokens": sum(w.tokens for w in factors), "sequences": sum(w.sequences for w in factors)}
        size = collectives.all_reduce_sum(counts, worker.grid.groups.dp)
        if not size["tokens"]:
            return None

        unit_weights = token_weights(list(lengths.values()), algo.aggregation, **size, fixed=algo.aggregation_tokens)
        weight_of = dict(zip(lengths, unit_weights, strict=True))
        weights = [weight_of[unit] for unit in units]
        if rows.weights:
            weights = [x * w.loss for x, w in zip(weights, rows.weights, strict=True)]
        loss = ActorLoss(rows, algo, weights)
        result, values = worker.train(rows.prompts, rows.responses, loss, worker.head(temperature), lr, rows.routes)
        if not result.applied:
            for text in filter(None, collectives.all_gather(loss.error)):
                raise StepError(text)
        # Only the last pipeline stage has values.
        batch_metrics = [(v.sums, v.maxima) for v in values]
        sums = {k: sum((s[k] for s, _ in batch_metrics), 0.0) for k in losses.SUMS}
        maxima = {k: max((m[k] for _, m in batch_metrics), default=0.0) for k in losses.MAXIMA}
        groups = (worker.grid.groups.pp, worker.grid.groups.dp_cp)
        return result, collectives.all_reduce_sum(sums, *groups) | collectives.all_reduce_max(maxima, *groups)

    updates = _take_steps(step, mini_batches, optim, first_update, total_updates, experience, worker.grid)
    sums = {key: updates.total(key) for key in losses.SUMS}
    first_batch = updates.metrics[0] if updates.metrics else {"rollout_gap": 0.0, "tokens": 0.0, "rollout_gap_max": 0.0}

    # make_experience reports the KL if it is part of the reward.
    tokens = sums["tokens"] or 1.0
    metrics = {"reference_kl": sums["reference_kl"] / tokens} if algo.kl_coef and algo.kl_in == "loss" else {}
    means = ("entropy", "clipped_low", "clipped_high", "clipped_dual", "approx_kl")
    return {
        **metrics,
        # Each loss has the divisor of its own mini-batch, so this is a mean over steps, including skipped ones.
        "loss": sums["loss"] / updates.steps,
        "grad_norm": sum(updates.norms) / updates.steps,
        "updates": float(updates.applied),
        "updates_skipped": float(len(updates.norms) - updates.applied),
        "lr": updates.lr,
        **{name: sums[name] / tokens for name in means},
        "ratio_mean": sums["ratio"] / tokens,
        "ratio_max": max((m["ratio_max"] for m in updates.metrics), default=0.0),
        "logprob_gap_mean": first_batch["rollout_gap"] / (first_batch["tokens"] or 1.0),
        "logprob_gap_max": first_batch["rollout_gap_max"],
        "trained_tokens": sums["tokens"],
    }


def update_critic(
    critic: CriticWorker,
    experience: Experience,
    mini_batches: list[list[int]],
    clip: float,
    optim: OptimConfig,
    first_update: int,
    total_updates: int = 0,
) -> dict[str, float]:
    """Take one optimizer step per mini-batch on the critic; return metrics, the same on every rank.

    mini_batches: this rank's rows of each one, as in update_policy. clip: config key critic.clip. first_update: the
    critic's optimizer steps applied before. value_loss is the mean over steps of the token mean, value_clipped the
    share of tokens whose gradient the clipping removed.
    """

    def step(lr: float, indices: list[int]) -> StepMetrics | None:
        rows = experience.select(indices)
        own_tokens = float(sum(rows.sampled_tokens()))
        tokens = collectives.all_reduce_sum({"tokens": own_tokens}, critic.grid.groups.dp)["tokens"]
        if not tokens:
            return None
        loss = _critic_loss(rows, clip or math.inf, 1 / tokens, critic.options.ops)
        result, values = critic.train(rows.prompts, rows.responses, loss, critic.critic.values, lr)
        own = {key: sum((v.sums[key] for v in values), 0.0) for key in _VALUE_SUMS}
        return result, collectives.all_reduce_sum(own, critic.grid.groups.pp, critic.grid.groups.dp_cp)

    updates = _take_steps(step, mini_batches, optim, first_update, total_updates, experience, critic.grid)
    return {
        "value_loss": updates.total("loss") / updates.steps,
        "value_clipped": updates.total("clipped") / (updates.total("tokens") or 1.0),
        "critic_grad_norm": sum(updates.norms) / updates.steps,
        "critic_updates": float(updates.applied),
        "critic_updates_skipped": float(len(updates.norms) - updates.applied),
        "critic_lr": updates.lr,
    }


@dataclass(frozen=True)
class _Steps:
    """The optimizer steps of one model over the mini-batches that had rows."""

    metrics: list[dict[str, float]]
    norms: list[float]
    applied: int
    lr: float  # of the last step that was applied; 0 without one

    @property
    def steps(self) -> int:
        """The divisor of means over steps."""
        return max(len(self.norms), 1)

    def total(self, key: str) -> float:
        """Sum a metric over the steps."""
        return sum((m[key] for m in self.metrics), 0.0)


def _take_steps(
    step: Callable[[float, list[int]], StepMetrics | None],
    mini_batches: list[list[int]],
    optim: OptimConfig,
    first_update: int,
    total_updates: int,
    experience: Experience,
    grid: Grid,
) -> _Steps:
    """Take one optimizer step per mini-batch. Collective, also for ranks without rows.

    step: (learning rate, rows) -> its result, or None if no replica has a token. A step whose gradient is not finite is
    skipped and its rows are logged; it changes neither the weights nor the position in the learning-rate schedule.
    """
    metrics = []
    norms = []
    applied = 0
    lr = 0.0
    for number, rows in enumerate(mini_batches):
        count(number, len(mini_batches))
        rate = learning_rate(optim, first_update + applied, total_updates)
        outcome = step(rate, rows)
        if outcome is None:
            continue
        result, step_metrics = outcome
        metrics.append(step_metrics)
        norms.append(result.grad_norm)
        if result.applied:
            applied += 1
            lr = rate
        else:
            log_rows("an update is skipped, its gradient is not finite; its rows are", rows, experience.ids, grid)
    return _Steps(metrics, norms, applied, lr)


class ActorLoss:
    """The policy loss of some rows, a worker.LossFunction."""

    def __init__(self, rows: Experience, algo: AlgoConfig, weights: list[float]) -> None:
        """weights: for each row, the weight of each of its tokens, see token_weights."""
        settings = PolicyLossSettings(**{f.name: getattr(algo, f.name) for f in fields(PolicyLossSettings)})
        # A KL in the reward must not count in the loss as well.
        self.settings = settings if algo.kl_in == "loss" else replace(settings, kl_coef=0.0)
        self.error = ""  # of the user's function on this rank
        self._rows = rows
        lengths = [len(ids) for ids in rows.responses]
        per_row = torch.tensor(weights, dtype=torch.float64)
        per_token = per_row.repeat_interleave(torch.tensor(lengths, dtype=torch.int64)).to(cpu_bridge.default_device())
        # A masked token stays in the stream with weight 0.
        if rows.mask:
            per_token *= torch.cat(rows.mask).to(per_token.device)
        self._weights = per_token.split(lengths)

    def tokens(self, batch: Packed, device: torch.device, dtype: torch.dtype) -> losses.PolicyTokens:
        """Return the inputs of the loss for the R tokens of a micro-batch. dtype: that of the model's activations."""
        rows = self._rows

        def gathered(column: Sequence[Tensor]) -> Tensor:
            return batch.gather(column).to(device, compute_dtype(dtype))

        return losses.PolicyTokens(
            rollout_log_probs=gathered(rows.rollout_log_probs),
            advantages=gathered(rows.advantages),
            weights=gathered(self._weights),
            old_log_probs=None if rows.old_log_probs is None else gathered(rows.old_log_probs),
            reference_log_probs=None if rows.reference_log_probs is None else gathered(rows.reference_log_probs),
            sequences=batch.repeat(torch.arange(len(rows))).to(device) if self.settings.of_sequences else None,
        )

    def __call__(self, batch: Packed, head: Head) -> tuple[Tensor, Any]:
        """Return the loss, a scalar, and its metrics, from head.hidden [R, H]."""
        try:
            result = head.policy_loss(self.tokens(batch, head.hidden.device, head.hidden.dtype), self.settings)
        except StepError as e:
            # With a gradient that is not finite, all ranks skip the optimizer step. Then they can raise together.
            self.error = self.error or str(e)
            return head.hidden.sum() * torch.nan, None
        # Metrics must not keep the graph of the loss alive.
        return result.loss, replace(result, loss=result.loss.detach())


def _critic_loss(rows: Experience, clip: float, weight: float, ops: Backend) -> LossFunction:
    if rows.values is None or rows.returns is None:
        raise ValueError("update_critic: the experience has no values and returns")
    old = rows.values
    returns = rows.returns

    def loss(batch: Packed, values: Tensor) -> tuple[Tensor, Any]:
        weights = torch.full_like(values, weight)
        if rows.sampled is not None:
            weights = weights * batch.gather(rows.sampled).to(values)
        result = ops.value_loss(values, batch.gather(old).to(values), batch.gather(returns).to(values), weights, clip)
        return result.loss, replace(result, loss=result.loss.detach())

    return loss
