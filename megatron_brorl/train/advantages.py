"""From the rewards of a step to the advantage of every token, and what the critic learns from.

A response earns its reward, or what its group's baseline leaves of it, at its last token. Generalised advantages take
that to every token; without a critic values are 0 and nothing is discounted, so that a token's advantage is what its
response earns from there on (Hu et al. 2025, REINFORCE++, section 3.3). A response that was cut off ends there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_brorl.algo.advantage import Moments, explained_variance, merge, moments, whiten
from megatron_brorl.algo.shaping import shaped
from megatron_brorl.config.schema import AlgoConfig, Config
from megatron_brorl.ops.reference import linear as reference
from megatron_brorl.parallel import collectives
from megatron_brorl.train import adaptive
from megatron_brorl.train.groups import Outcomes


def of_rollouts(outcomes: Outcomes, kept: Sequence[int], algo: AlgoConfig, ops: str) -> Tensor:
    """What every survivor of the kept groups earns, float32 [groups, N], 0 elsewhere.

    "gae": its reward. "grpo": what that is over its group's mean, in its standard deviations. "reinforce_pp_baseline":
    over its group's mean, whitened over all kept survivors, the global batch, each rollout once (BroRL, section 3.1);
    with a KL in the reward of_tokens whitens instead. ops: config key ops.implementation.
    """
    table = torch.zeros_like(outcomes.rewards)
    rewards = [outcomes.rewards_of(g) for g in kept]
    if not rewards:
        return table
    earned, starts = torch.cat(rewards), torch.tensor([0, *(len(r) for r in rewards)]).cumsum(0)
    if algo.advantage == "grpo":
        earned = _group_advantages(earned, starts, "mean_std", ops)
    elif algo.advantage == "reinforce_pp_baseline":
        earned = _group_advantages(earned, starts, "mean", ops)
        if not kl_in_reward(algo):
            earned = _whiten(earned, _moments(earned, ops), ops)
    where = torch.zeros_like(outcomes.ended)
    where[list(kept)] = outcomes.ended[list(kept)]
    table[where] = earned
    return table


def group_advantages(outcomes: Outcomes, config: Config, ops: str) -> tuple[Tensor, Tensor | None]:
    """Advantages of the kept groups [groups, N], and the weights of the rollouts [groups, N]; None: all 1."""
    rounds = adaptive.rounds_of(config.rollout)
    if rounds:
        return adaptive.of_rounds(outcomes, outcomes.kept, rounds)
    return of_rollouts(outcomes, outcomes.kept, config.algo, ops), None


def with_shaped_rewards(outcomes: Outcomes, config: Config, step: int) -> Outcomes:
    """With what config section shaping makes of the rewards at this step; which groups are kept does not change."""
    o, shaping = outcomes, config.shaping
    return replace(o, rewards=shaped(o.rewards, o.tokens, o.repeats, shaping, config.rollout.max_tokens, step))


def kl_in_reward(algo: AlgoConfig) -> bool:
    return algo.kl_coef > 0 and algo.kl_in == "reward"


@dataclass(frozen=True)
class Credit:
    """Of each row [G] float32."""

    advantages: tuple[Tensor, ...]
    returns: tuple[Tensor, ...] | None  # what the critic is to predict
    metrics: dict[str, float]  # the same on every rank


def of_tokens(
    earned: Tensor,
    lengths: Sequence[int],
    values: Sequence[Tensor] | None,
    kl: Sequence[Tensor] | None,
    algo: AlgoConfig,
    ops: str,
    replicas: dist.ProcessGroup | None,
) -> Credit:
    """The advantages of this replica's rows, from what each of them earned [B].

    values: [G] per row of the critic's; None: there is none. kl: [G] per row, of which algo.kl_coef times is taken off
    each token's reward (Ouyang et al. 2022, eq. 2); None: nothing is. With either a collective over the replicas: the
    advantages (not those of "grpo") are whitened over the tokens of the global batch, of which the metrics tell.
    """
    if values is None and kl is None:
        return Credit(tuple(a.expand(n) for a, n in zip(earned, lengths, strict=True)), None, {})
    starts = torch.tensor([0, *lengths]).cumsum(0)
    rewards = torch.zeros(int(starts[-1])) if kl is None else -algo.kl_coef * torch.cat([torch.zeros(0), *kl])
    rewards[starts[1:] - 1] += earned
    old = torch.zeros_like(rewards) if values is None else torch.cat([torch.zeros(0), *values])
    advantages, returns = _gae(rewards, old, starts, algo, ops)
    # An advantage is what the critic's value leaves of the return.
    of_returns, of_residuals = (_over_replicas(_moments(x, ops), replicas) for x in (returns, advantages))
    if algo.advantage != "grpo":
        advantages = _whiten(advantages, of_residuals, ops)
    sizes = list(lengths)
    if values is None:
        return Credit(advantages.split(sizes), None, {})
    metrics = {
        "explained_variance": explained_variance(of_returns, of_residuals),
        "return_mean": of_returns.mean,
        "value_mean": of_returns.mean - of_residuals.mean,
    }
    return Credit(advantages.split(sizes), returns.split(sizes), metrics)


def _group_advantages(rewards: Tensor, starts: Tensor, kind: reference.GroupKind, ops: str) -> Tensor:
    if ops == "fused":
        from megatron_brorl.ops.fused import advantages as fused_advantages

        return fused_advantages.group_advantages(rewards, starts, None, kind)
    return reference.group_advantages(rewards, starts, None, kind)


def _gae(rewards: Tensor, values: Tensor, starts: Tensor, algo: AlgoConfig, ops: str) -> tuple[Tensor, Tensor]:
    if ops == "fused":
        from megatron_brorl.ops.fused import advantages as fused_advantages

        return fused_advantages.gae(rewards, values, starts, gamma=algo.gamma, lam=algo.lam)
    return reference.gae(rewards, values, starts, gamma=algo.gamma, lam=algo.lam)


def _moments(values: Tensor, ops: str) -> Moments:
    if ops == "fused":
        from megatron_brorl.ops.fused import advantages as fused_advantages

        return fused_advantages.to_moments(fused_advantages.moments(values))
    return moments(values)


def _whiten(values: Tensor, batch: Moments, ops: str) -> Tensor:
    if ops == "fused":
        from megatron_brorl.ops.fused import advantages as fused_advantages

        return fused_advantages.whiten_(values, batch.mean, batch.std)
    return whiten(values, batch)


def _over_replicas(own: Moments, replicas: dist.ProcessGroup | None) -> Moments:
    return merge([Moments(*part) for part in collectives.all_gather([own.count, own.mean, own.m2], replicas)])
