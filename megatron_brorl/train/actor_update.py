"""The actor's update: mini-batches, the clipped loss, and the metrics people watch."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_brorl.algo import loss as losses
from megatron_brorl.algo.aggregation import token_weights
from megatron_brorl.algo.policy_losses import PolicyLossSettings
from megatron_brorl.config.schema import AlgoConfig, OptimConfig
from megatron_brorl.models.gpt import Head
from megatron_brorl.ops.dtypes import compute_dtype
from megatron_brorl.parallel import collectives
from megatron_brorl.parallel.batch import Packed
from megatron_brorl.train.finite import train_on_finite
from megatron_brorl.train.learning_rate import learning_rate
from megatron_brorl.train.worker import Update, Worker
from megatron_brorl.types import Experience


def update_policy(
    worker: Worker,
    experience: Experience,
    mini_batches: list[list[int]],
    algo: AlgoConfig,
    optim: OptimConfig,
    temperature: float,
    first_update: int,
) -> dict[str, float]:
    """One optimizer step per mini-batch; returns their metrics, the same on every rank.

    mini_batches: this rank's rows of each, epoch by epoch, as many as on every rank. first_update: optimizer steps
    taken before.

    "updates" counts the optimizer steps taken, "updates_skipped" those not applied because the gradient was not finite.
    Metrics are token means over all mini-batches; logprob_gap_* are of the first mini-batch that has rows, where the
    actor still has the weights that the engine sampled the newest tokens from. nonfinite_rows are those that had to be
    left out of an update, and of those after it, because the actor's log-probabilities of them are not finite.
    """
    sums = dict.fromkeys(losses.SUMS, 0.0)
    ratio_max, norms, taken, gap, lr = 0.0, [], 0, {"mean": 0.0, "max": 0.0}, 0.0
    # Rows found not finite: left out of every later mini-batch too, since epochs bring them again.
    broken: set[int] = set()

    # What tells a row that is not finite from the others.
    def score(rows: list[int]) -> list[Tensor]:
        part = experience.take(rows)
        return worker.log_probs(part.prompts, part.responses, temperature)

    # Every rank takes every turn, also without a row of its own: a step is a collective.
    for rows in mini_batches:
        # Only optimizer steps that were taken move the schedule.
        rate = learning_rate(optim, first_update + taken)
        attempt = partial(_attempt, worker, experience, algo, temperature, rate)
        done, left_out = train_on_finite(
            [r for r in rows if r not in broken], attempt, score, worker.grid, experience.ids
        )
        broken |= set(left_out)

        # Sums over mini-batches, of which the metrics are means.
        if done is None:
            continue  # every rank's share of this mini-batch was dropped
        update, found = done
        for key in losses.SUMS:
            sums[key] += found[key]
        ratio_max = max(ratio_max, found["ratio_max"])
        norms.append(update.grad_norm)
        # A skipped update leaves weights and schedule where they are.
        if update.applied:
            taken, lr = taken + 1, rate

        # Later mini-batches meet an actor that has moved: their gap is the update's, not the engine's.
        if len(norms) == 1:
            gap = {"mean": found["rollout_gap"] / (found["tokens"] or 1.0), "max": found["rollout_gap_max"]}

    # Where nothing was trained means are 0. A KL that is taken off rewards is reported by make_experience.
    tokens = sums["tokens"] or 1.0
    metrics = {"reference_kl": sums["reference_kl"] / tokens} if algo.kl_coef and algo.kl_in == "loss" else {}
    return {
        **metrics,
        # Means over optimizer steps, skipped ones too. Each loss carries the divisor of its own batch.
        "loss": sums["loss"] / max(len(norms), 1),
        "grad_norm": sum(norms) / max(len(norms), 1),
        "updates": float(taken),
        "updates_skipped": float(len(norms) - taken),
        "lr": lr,
        # Means over the tokens of all mini-batches: a token counts once per epoch.
        "entropy": sums["entropy"] / tokens,
        "clipped_low": sums["clipped_low"] / tokens,
        "clipped_high": sums["clipped_high"] / tokens,
        "clipped_dual": sums["clipped_dual"] / tokens,
        "approx_kl": sums["approx_kl"] / tokens,
        "ratio_mean": sums["ratio"] / tokens,
        "ratio_max": ratio_max,
        # Of the first mini-batch with rows.
        "logprob_gap_mean": gap["mean"],
        "logprob_gap_max": gap["max"],
        "trained_tokens": sums["tokens"],
        # A replica's ranks have the same rows, so only replicas are added up.
        "nonfinite_rows": collectives.all_reduce_sum({"rows": float(len(broken))}, worker.grid.groups.dp)["rows"],
    }


def _attempt(
    worker: Worker, experience: Experience, algo: AlgoConfig, temperature: float, lr: float, rows: list[int]
) -> tuple[Update, dict[str, float]] | None:
    """One optimizer step on these rows with its metrics over all ranks; None where no replica has a token."""
    # How large the global mini-batch is, by which the loss is divided.
    part = experience.take(rows)
    lengths = [len(r) for r in part.responses]
    own = {"tokens": float(sum(lengths)), "sequences": float(sum(n > 0 for n in lengths))}
    size = collectives.all_reduce_sum(own, worker.grid.groups.dp)
    if not size["tokens"]:
        return None

    weights = token_weights(lengths, algo.aggregation, **size, fixed=algo.aggregation_tokens)
    loss = ActorLoss(part, algo, weights)
    update, values = worker.train(part.prompts, part.responses, loss, temperature, lr)
    return update, _over_ranks(worker, values)


class ActorLoss:
    """The loss of these rows, as worker.LossFunction."""

    def __init__(self, part: Experience, algo: AlgoConfig, weights: list[float]) -> None:
        """weights: of a token of each row."""
        settings = PolicyLossSettings(**{f.name: getattr(algo, f.name) for f in fields(PolicyLossSettings)})
        # A KL that is taken off rewards must not count in the loss as well.
        self.settings = settings if algo.kl_in == "loss" else replace(settings, kl_coef=0.0)
        self._part = part
        # What a row has once, to be spread over its tokens by each micro-batch.
        self._row_weights = torch.tensor(weights, dtype=torch.float64)
        self._row_numbers = torch.arange(len(weights))

    def tokens(self, batch: Packed, where: torch.device, dtype: torch.dtype) -> losses.PolicyTokens:
        """What the loss knows of the R tokens of a micro-batch, on a device; dtype: of the model's activations."""
        part, dtype = self._part, compute_dtype(dtype)
        # Columns may be absent: which ones there are is a matter of the recipe.
        old, reference, mask = part.old_log_probs, part.reference_log_probs, part.mask

        # A masked token stays in the stream, and has weight 0: the loss then looks at nothing else of it.
        of_tokens = batch.repeat(self._row_weights)
        if mask is not None:
            of_tokens = of_tokens * batch.gather(mask)

        # Columns are by row and on the CPU; the loss takes this micro-batch's tokens, in its order, on its device.
        return losses.PolicyTokens(
            rollout_log_probs=batch.gather(part.rollout_log_probs).to(where, dtype),
            advantages=batch.gather(part.advantages).to(where, dtype),
            weights=of_tokens.to(where, dtype),
            old_log_probs=None if old is None else batch.gather(old).to(where, dtype),
            reference_log_probs=None if reference is None else batch.gather(reference).to(where, dtype),
            sequences=batch.repeat(self._row_numbers).to(where) if self.settings.ratio == "sequence" else None,
        )

    def __call__(self, batch: Packed, head: Head) -> tuple[Tensor, Any]:
        """The loss, a scalar, and what came of it; of head.rows [R, H]."""
        result = head.policy_loss(self.tokens(batch, head.rows.device, head.rows.dtype), self.settings)
        # Autograd gets the loss; what is kept for the metrics must not keep its graph alive.
        return result.loss, replace(result, loss=result.loss.detach())


def _over_ranks(worker: Worker, values: list[losses.PolicyLoss]) -> dict[str, float]:
    """Metrics of all micro-batches of all ranks; only the last pipeline stage has any."""
    grid = worker.grid
    sums = {k: sum((v.sums[k] for v in values), 0.0) for k in losses.SUMS}
    maxima = {k: max((v.maxima[k] for v in values), default=0.0) for k in losses.MAXIMA}
    groups = (grid.groups.pp, grid.groups.dp_cp)
    return collectives.all_reduce_sum(sums, *groups) | collectives.all_reduce_max(maxima, *groups)
