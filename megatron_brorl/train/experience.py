"""Advantages and log-probabilities of the rollouts that a step trains on.

The reward of a response, or its difference to the baseline of the group, is the reward of its last token, even if the
response was cut off. Generalised advantage estimation spreads it over the tokens. Without a critic, values are 0 and
nothing is discounted. The advantage of a token is then the sum of the rewards from there on (Hu et al. 2025,
REINFORCE++, section 3.3).

Columns contain only the sampled tokens, as if these followed each other directly. The tokens of an environment are left
out, and Experience has 0 in their places.

A row does not count in losses and their divisors if one of its values or log-probabilities is NaN or infinite. Its
reward still counts in the baseline of its group and in whitening.

A column is a tuple of one tensor per row, on the device of this process. On a GPU an operation per row would take
longer to launch than to run, so columns are concatenated for arithmetic, and rows are views of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_brorl.algo.advantages import explained_variance, group_advantages, is_whitened, merge
from megatron_brorl.algo.policy_loss import kl_estimate, mismatch_mask
from megatron_brorl.algo.shaping import shaped
from megatron_brorl.config.schema import AlgoConfig, Config
from megatron_brorl.errors import print_error
from megatron_brorl.ops.backend import Backend
from megatron_brorl.parallel import collectives, cpu_bridge
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.parallel.packing import MIN_SHARING_GAIN, copies_by_routes, token_gain
from megatron_brorl.train.groups import Outcomes, Subset
from megatron_brorl.train.models import TrainingModels
from megatron_brorl.train.worker import Worker
from megatron_brorl.types import Experience, PromptGroup, TrainingRollout

Rows = tuple[Tensor, ...]  # [G] of each row
MISMATCH_BOUNDS = (0.5, 5.0)  # smallest and largest pi_old / pi_rollout that algo.mismatch_mask leaves
_NAMED = 16  # rows that a message names
_ROUNDING = 1e-6  # largest error of an advantage in float32, in units of the standard deviation


def kl_in_reward(algo: AlgoConfig) -> bool:
    """Return whether the KL to the reference is subtracted from rewards instead of being a term of the loss."""
    return algo.kl_coef > 0 and algo.kl_in == "reward"


def shape_rewards(outcomes: Outcomes, config: Config, step: int) -> Outcomes:
    """Apply the config section shaping to the rewards of a step. The choice of kept groups does not change."""
    tables = outcomes.rewards, outcomes.right, outcomes.sampled, outcomes.repeats
    return replace(outcomes, rewards=shaped(*tables, config.shaping, config.rollout.max_tokens, step))


def rollout_advantages(outcomes: Outcomes, groups: Sequence[PromptGroup], algo: AlgoConfig, ops: Backend) -> Tensor:
    """Return the advantages of all survivors of the kept groups by algo.advantage, float32 [groups, N]; 0 elsewhere.

    groups: one for each row of the result. The advantages are whitened over all survivors of kept groups, which are the
    global batch (BroRL, section 3.1), unless the estimator is relative to its own group (algo.advantages.Advantage) or
    token_advantages whitens later.
    """
    table = torch.zeros_like(outcomes.rewards)
    kept = outcomes.kept
    if not kept:
        return table

    survived = outcomes.ended[kept]
    rows = [groups[g].prompt.row() for g in kept]
    advantages = group_advantages(outcomes.rewards[kept], survived, rows, algo)[survived].float()
    if is_whitened(algo.advantage) and algo.advantage != "gae" and not kl_in_reward(algo):
        on_device = advantages.to(cpu_bridge.default_device())
        advantages = ops.whiten(on_device, ops.moments(on_device)).cpu()
        # The mean of the batch is 0 up to rounding, and tokens whose advantage is only rounding would count as clipped.
        advantages = torch.where(advantages.abs() < _ROUNDING, 0.0, advantages)

    kept_survivors = torch.zeros_like(outcomes.ended)
    kept_survivors[kept] = survived
    table[kept_survivors] = advantages
    return table


def token_advantages(
    rewards: Tensor,
    lengths: Sequence[int],
    values: Sequence[Tensor] | None,
    kl: Sequence[Tensor] | None,
    algo: AlgoConfig,
    ops: Backend,
    replicas: dist.ProcessGroup | None,
) -> tuple[Rows, Rows | None, dict[str, float]]:
    """Return the advantages of this replica's tokens, the returns for the critic if there is one, and metrics.

    rewards: [B], the reward of each last token, from rollout_advantages. lengths: sampled tokens of each row, the G of
    this function. values: [G] per row from the critic, or None. kl: [G] per row; algo.kl_coef times it is subtracted
    from the reward of each token (Ouyang et al. 2022, eq. 2). If either is given, this is a collective over the
    replicas, and the advantages are whitened over the tokens of the global batch if algo.advantage is a whitened one.
    """
    sizes = list(lengths)
    if values is None and kl is None:
        per_token = rewards.repeat_interleave(torch.tensor(sizes, dtype=torch.int64))
        return per_token.to(cpu_bridge.default_device()).split(sizes), None, {}

    starts = torch.tensor([0, *sizes], device=cpu_bridge.default_device()).cumsum(0)
    per_token = starts.new_zeros(sum(sizes), dtype=torch.float32) if kl is None else -algo.kl_coef * _flat(kl)
    per_token[starts[1:] - 1] += rewards.to(starts.device)  # at the last token of each row
    old_values = torch.zeros_like(per_token) if values is None else _flat(values)
    advantages, returns = ops.gae(per_token, old_values, starts, gamma=algo.gamma, lam=algo.lam)

    # An advantage is the residual of the critic: the return minus the value.
    return_moments = merge(collectives.all_gather(ops.moments(returns), replicas))
    residual_moments = merge(collectives.all_gather(ops.moments(advantages), replicas))
    if is_whitened(algo.advantage):
        advantages = ops.whiten(advantages, residual_moments)

    if values is None:
        return advantages.split(sizes), None, {}
    metrics = {
        "explained_variance": explained_variance(return_moments, residual_moments),
        "return_mean": return_moments.mean,
        "value_mean": return_moments.mean - residual_moments.mean,
    }
    return advantages.split(sizes), returns.split(sizes), metrics


def make_experience(
    rollouts: Sequence[TrainingRollout],
    groups: Sequence[PromptGroup],
    advantages: Tensor,
    models: TrainingModels,
    algo: AlgoConfig,
    temperature: float,
    subset: Subset | None = None,
) -> tuple[Experience, dict[str, float]]:
    """Return the experience of this replica's rollouts, and metrics, the same on every rank. Collective.

    Each sequence of an agent's rollout is a row. A row with a log-probability or value that is NaN or infinite is left
    out and counted. advantages: [groups, N] of the whole step, from rollout_advantages. subset: the rollouts of the
    step; None without algo.train_on.
    """
    actor = models.actor
    rollouts, prompts = _rows(rollouts, groups)
    responses = tuple(r.token_ids for r in rollouts)
    routes = tuple(r.routes for r in rollouts if r.routes is not None) or None  # all rollouts have routes, or none has
    # From here to Experience, all columns have the sampled tokens only.
    sampled = None
    if any(r.sampled is not None for r in rollouts):
        sampled = tuple(torch.ones_like(r.token_ids).bool() if r.sampled is None else r.sampled for r in rollouts)
    numbers = {"rollout_log_probs": _column([r.log_probs for r in rollouts], sampled)}
    # With a single update, the old policy is the current one, so no old log-probabilities are needed.
    if algo.old_log_probs == "rollout":
        numbers["old_log_probs"] = numbers["rollout_log_probs"]
    elif (
        algo.mini_batches * algo.epochs > 1
        or algo.mismatch_mask != "off"
        or kl_in_reward(algo)
        or algo.distill_coef > 0
    ):
        numbers["old_log_probs"] = _column(actor.log_probs(prompts, responses, temperature, routes), sampled)
    if models.reference:
        numbers["reference_log_probs"] = _column(models.reference.log_probs(prompts, responses, temperature), sampled)
    if models.teacher:
        log_probs = _teacher_log_probs(models.teacher, prompts, responses, temperature)
        numbers["teacher_log_probs"] = _column(log_probs, sampled)
    if models.critic:
        numbers["values"] = _column(models.critic.values(prompts, responses), sampled)

    # Leave out rows with a NaN, which would spread to all rows through moments and means.
    finite = finite_rows(list(numbers.values()), actor.grid)
    ids = tuple(f"{groups[r.group].prompt.id}/{r.index}" for r in rollouts)
    broken = [row for row, is_finite in enumerate(finite) if not is_finite]
    log_rows("left out of the step, log-probabilities or values are not finite", broken, ids, actor.grid)
    inputs = {
        "prompts": prompts,
        "responses": responses,
        "sampled": sampled,
        "routes": routes,
        "slots": tuple((r.group, r.index) for r in rollouts),
        "ids": ids,
    }
    columns: dict[str, Any] = {
        name: None if column is None else tuple(compress(column, finite))
        for name, column in {**inputs, **numbers}.items()
    }
    old = columns.setdefault("old_log_probs", None)
    reference = columns.get("reference_log_probs")
    teacher = columns.pop("teacher_log_probs", None)
    sampled = columns["sampled"]
    slots = columns["slots"]
    counts = {"finite_rows": float(sum(finite)), "nonfinite_rows": float(len(finite) - sum(finite))}

    metrics = collectives.all_reduce_sum(counts, actor.grid.groups.dp)
    lengths = [len(x) for x in columns["rollout_log_probs"]]
    kl = None
    if kl_in_reward(algo) and old is not None and reference is not None:
        kl = kl_estimate(_flat(old) - _flat(reference), algo.kl_estimator).split(lengths)
        metrics["reference_kl"] = _token_mean(kl, actor)

    # Masked tokens stay in the row, because later tokens attend to them.
    if algo.mismatch_mask != "off" and old is not None:
        both = [_flat(x).cpu().split(lengths) for x in (old, columns["rollout_log_probs"])]
        masks = [mismatch_mask(o, r, algo.mismatch_mask, *MISMATCH_BOUNDS) for o, r in zip(*both, strict=True)]
        columns["mask"] = _column(masks)
        metrics["masked_share"] = 1 - _token_mean(columns["mask"], actor)

    per_rollout = advantages[[group for group, _ in slots], [index for _, index in slots]]
    per_token, columns["returns"], critic_metrics = token_advantages(
        per_rollout, lengths, columns.get("values"), kl, algo, actor.options.ops, actor.grid.groups.dp
    )
    # Subtract the sampled tokens' reverse KL (Agarwal et al. 2024, section 3). It comes after whitening, which would
    # rescale it and subtract its mean.
    if teacher is not None and old is not None:
        gaps = _flat(old) - _flat(teacher)
        metrics["teacher_kl"] = _token_mean([gaps], actor)
        per_token = (_flat(per_token) - algo.distill_coef * gaps).split(lengths)
    columns["advantages"] = per_token

    if sampled is not None:
        for name in columns.keys() - inputs.keys():
            columns[name] = None if columns[name] is None else _filled(sampled, columns[name])
        columns["mask"] = columns.get("mask") or sampled
    return Experience(**columns, weights=subset.weights(slots) if subset else ()), metrics | critic_metrics


def finite_rows(columns: Sequence[Sequence[Tensor]], grid: Grid) -> list[bool]:
    """Return whether all values of each row are finite on all ranks of the replica. Collective of the replica.

    columns: [G] per row each; all ranks of a replica have the same rows.
    """
    if not columns[0]:
        return []
    row_of = torch.arange(len(columns[0])).repeat_interleave(torch.tensor([len(row) for row in columns[0]]))
    broken = torch.zeros(len(columns[0]), dtype=torch.int32)
    for column in columns:
        broken[row_of[~torch.cat(list(column)).isfinite().cpu()]] = 1
    return (collectives.all_reduce_tensor(broken, dist.ReduceOp.MAX, grid.replica) == 0).tolist()


def log_rows(what: str, rows: Sequence[int], ids: Sequence[str], grid: Grid) -> None:
    """Print the ids of the first of these rows to stderr, once per replica."""
    if rows and dist.get_rank(grid.replica) == 0:
        named = ", ".join(ids[row] if ids else f"row {row}" for row in rows[:_NAMED])
        more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
        print_error(f"rank {grid.rank}: {what}: {named}{more}")


def sharing_metrics(actor: Worker, experience: Experience, replays: bool) -> dict[str, float]:
    """Return metrics of prompts that the actor computes once for several responses, over all replicas. Collective.

    token_gain: tokens with one prompt per response, divided by those that the actor computed. If it replays routes,
    also unshared_by_routes: the share of rows that need a further copy of their prompt because of its routes.
    """
    prompts, responses, routes = experience.prompts, experience.responses, experience.routes
    options = actor.options
    plain = float(sum(map(len, prompts)) + sum(len(r) - 1 for r in responses))
    # A prompt counts once in each micro-batch that has it, and once for each of its routes.
    limit = options.tokens_per_micro_batch * actor.grid.cp_size
    gain = token_gain(prompts, responses, limit, routes) if options.share_prompt else 1.0
    own = {
        "plain": plain,
        "computed": plain / gain if gain >= MIN_SHARING_GAIN else plain,
        "rows": float(len(experience)),
        "copies": float(copies_by_routes(prompts, responses, routes)),
    }
    totals = collectives.all_reduce_sum(own, actor.grid.groups.dp)
    metrics = {"token_gain": totals["plain"] / totals["computed"] if totals["plain"] else 1.0}
    if replays and options.share_prompt:
        metrics["unshared_by_routes"] = totals["copies"] / (totals["rows"] or 1.0)
    return metrics


def _rows(
    rollouts: Sequence[TrainingRollout], groups: Sequence[PromptGroup]
) -> tuple[list[TrainingRollout], tuple[Tensor, ...]]:
    """Return the rollouts with one sequence each, and their prompts [tokens]. Equal prompts of a group are one tensor.

    Packing recognises a shared prompt by its tensor.
    """
    sequence_prompts: dict[tuple[int, bytes], Tensor] = {}  # by group and bytes of the tokens
    prompt_of = {g: torch.tensor(groups[g].prompt.token_ids, dtype=torch.int64) for g in {r.group for r in rollouts}}
    rows, row_prompts = [], []
    for r in rollouts:
        if r.sampled is None or not r.starts:
            rows.append(r)
            row_prompts.append(prompt_of[r.group])
            continue
        for begin, end in pairwise((*r.starts, len(r.token_ids))):
            first_sampled = begin + int(r.sampled[begin:end].int().argmax())
            prompt = r.token_ids[begin:first_sampled]
            row_prompts.append(sequence_prompts.setdefault((r.group, prompt.numpy().tobytes()), prompt))
            parts = {name: getattr(r, name)[first_sampled:end] for name in ("token_ids", "log_probs", "sampled")}
            rows.append(replace(r, **parts, starts=()))
    return rows, tuple(row_prompts)


def _column(rows: Sequence[Tensor], sampled: Rows | None = None) -> Rows:
    """Return the rows on this process's device, restricted to the sampled tokens if a mask is given."""
    device = cpu_bridge.default_device()
    if sampled is None and all(x.device == device for x in rows):
        return tuple(rows)
    if sampled is None:
        return _flat(rows).split([len(x) for x in rows])
    return _flat(rows)[_flat(sampled)].split([int(s.sum()) for s in sampled])


def _filled(sampled: Rows, column: Rows) -> Rows:
    """Undo the restriction of _column: return rows of all tokens, with 0 or false at those that were not sampled."""
    mask, values = _flat(sampled), _flat(column)
    return values.new_zeros(len(mask)).masked_scatter(mask, values).split([len(s) for s in sampled])


def _flat(column: Sequence[Tensor]) -> Tensor:
    """Return the tokens of all rows on this process's device, [tokens]."""
    return (torch.cat(list(column)) if column else torch.zeros(0)).to(cpu_bridge.default_device())


def _teacher_log_probs(teacher: Worker, prompts: Rows, responses: Rows, temperature: float) -> Rows:
    """Return the teacher's log-probabilities as Worker.log_probs does.

    The student can sample ids from the padding of its vocabulary. Beyond the teacher's vocabulary they get -inf.
    """
    vocab = teacher.shape.vocab
    log_probs = _flat(teacher.log_probs(prompts, [ids.clamp(max=vocab - 1) for ids in responses], temperature))
    return log_probs.masked_fill(_flat(responses) >= vocab, -torch.inf).split([len(ids) for ids in responses])


def _token_mean(column: Sequence[Tensor], worker: Worker) -> float:
    values = _flat(column).double()
    own = {"sum": float(values.sum()), "tokens": float(len(values))}
    totals = collectives.all_reduce_sum(own, worker.grid.groups.dp)
    return totals["sum"] / totals["tokens"] if totals["tokens"] else float("nan")
