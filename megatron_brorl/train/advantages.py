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

from megatron_brorl.algo.advantages import Moments, explained_variance, merge
from megatron_brorl.algo.objectives import over_group_mean, pass_at_k_advantages
from megatron_brorl.algo.shaping import shaped
from megatron_brorl.config.schema import AlgoConfig, Config
from megatron_brorl.ops.interface import Backend
from megatron_brorl.parallel import collectives
from megatron_brorl.train.groups import Outcomes

_SCALED = ("grpo", "maxrl")  # in units of their group's own: not whitened over the batch


def of_rollouts(outcomes: Outcomes, kept: Sequence[int], algo: AlgoConfig, ops: Backend) -> Tensor:
    """The advantage of every survivor of the kept groups, float32 [groups, N], 0 elsewhere.

    "gae": its reward. "grpo": what that is over its group's mean, in its standard deviations. "reinforce_pp_baseline":
    over its group's mean, whitened over all kept survivors, the global batch, each rollout once (BroRL, section 3.1);
    with a KL in the reward of_tokens whitens instead. "pass_at_k": what it adds to pass@k, whitened likewise. "maxrl":
    over its group's mean, in units of that mean.
    """
    table = torch.zeros_like(outcomes.rewards)
    rewards = [outcomes.rewards_of(g) for g in kept]
    if not rewards:
        return table
    advantages, sizes = torch.cat(rewards), torch.tensor([len(r) for r in rewards])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])

    if algo.advantage == "grpo":
        advantages = ops.group_advantages(advantages, starts, "mean_std")
    elif algo.advantage == "reinforce_pp_baseline":
        advantages = ops.group_advantages(advantages, starts, "mean")
    elif algo.advantage == "maxrl":
        advantages = torch.cat([over_group_mean(r) for r in rewards])
    elif algo.advantage == "pass_at_k":
        advantages = torch.cat([pass_at_k_advantages(r, algo.pass_k) for r in rewards])

    # With a KL in the reward, of_tokens whitens later.
    if algo.advantage in ("reinforce_pp_baseline", "pass_at_k") and not kl_in_reward(algo):
        advantages = ops.whiten(advantages, ops.moments(advantages))

    where = torch.zeros_like(outcomes.ended)
    where[list(kept)] = outcomes.ended[list(kept)]
    table[where] = advantages
    return table


def with_shaped_rewards(outcomes: Outcomes, config: Config, step: int) -> Outcomes:
    """With what config section shaping makes of the rewards at this step; which groups are kept does not change."""
    o, shaping = outcomes, config.shaping
    return replace(o, rewards=shaped(o.rewards, o.right, o.tokens, o.repeats, shaping, config.rollout.max_tokens, step))


def kl_in_reward(algo: AlgoConfig) -> bool:
    """Whether the KL to the reference is taken off rewards; otherwise it is a term of the loss, or there is none."""
    return algo.kl_coef > 0 and algo.kl_in == "reward"


@dataclass(frozen=True)
class Credit:
    """Of each row [G] float32."""

    advantages: tuple[Tensor, ...]
    returns: tuple[Tensor, ...] | None  # what the critic is to predict
    metrics: dict[str, float]  # the same on every rank


def of_tokens(
    group_advantages: Tensor,
    lengths: Sequence[int],
    values: Sequence[Tensor] | None,
    kl: Sequence[Tensor] | None,
    algo: AlgoConfig,
    ops: Backend,
    replicas: dist.ProcessGroup | None,
) -> Credit:
    """The advantages of this replica's rows, from group advantages [B] (of_rollouts).

    values: [G] per row of the critic's; None: there is none. kl: [G] per row, of which algo.kl_coef times is taken off
    each token's reward (Ouyang et al. 2022, eq. 2); None: nothing is. With either a collective over the replicas: the
    advantages (not those of _SCALED) are whitened over the tokens of the global batch, of which the metrics tell.
    """
    if values is None and kl is None:
        return Credit(tuple(a.expand(n) for a, n in zip(group_advantages, lengths, strict=True)), None, {})

    # The group advantage is the reward of the last token; a KL is taken off that of every token.
    starts = torch.tensor([0, *lengths]).cumsum(0)
    rewards = torch.zeros(int(starts[-1])) if kl is None else -algo.kl_coef * torch.cat([torch.zeros(0), *kl])
    rewards[starts[1:] - 1] += group_advantages

    old = torch.zeros_like(rewards) if values is None else torch.cat([torch.zeros(0), *values])
    advantages, returns = ops.gae(rewards, old, starts, gamma=algo.gamma, lam=algo.lam)
    # An advantage is what the critic's value leaves of the return.
    # Merged over replicas, so that all of them whiten by the same numbers.
    of_returns, of_residuals = (_over_replicas(ops.moments(x), replicas) for x in (returns, advantages))
    if algo.advantage not in _SCALED:
        advantages = ops.whiten(advantages, of_residuals)

    # Without a critic nobody learns from returns, and there is no value to judge.
    sizes = list(lengths)
    if values is None:
        return Credit(advantages.split(sizes), None, {})
    metrics = {
        "explained_variance": explained_variance(of_returns, of_residuals),
        "return_mean": of_returns.mean,
        # Both moments are of the same tokens, so that means subtract to the mean value.
        "value_mean": of_returns.mean - of_residuals.mean,
    }
    return Credit(advantages.split(sizes), returns.split(sizes), metrics)


def _over_replicas(own: Moments, replicas: dist.ProcessGroup | None) -> Moments:
    return merge([Moments(*part) for part in collectives.all_gather([own.count, own.mean, own.m2], replicas)])
