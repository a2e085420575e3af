"""What siblings at one prefix say about one softmax of the policy, token by token. Pure functions.

The words exact, bound and estimate are those of theory.diagnostics.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLevel:
    """The mass balance at S positions; every field is [S] float64. Changes are per unit of the step size."""

    siblings: Tensor  # n, rollouts that share the prefix
    success: Tensor  # Q, their mean reward. Estimate
    unsampled_mass: Tensor  # sum of p over tokens that no sibling drew. Exact
    unsampled_2: Tensor  # sum of p^2 over them. Exact
    s_r: Tensor  # sum over drawn tokens of (their siblings' mean reward - Q) p
    a2: Tensor  # sum of p^2 over drawn tokens whose siblings did better than Q. Exact, but for who is in it
    b2: Tensor  # the same for worse than Q
    sampled: Tensor  # change of Q from tokens that half of the siblings drew, under BroRL's surrogate. Estimate
    unsampled_low: Tensor  # the change from undrawn tokens is at least this. Bound
    unsampled_high: Tensor  # and at most this. Bound
    # Change of Q under REINFORCE with the group mean, where undrawn tokens have no part. Estimate
    policy_gradient: Tensor


def token_level(logits: Tensor, position: Tensor, token: Tensor, reward: Tensor) -> TokenLevel:
    """Mass balance at S positions from the policy's full softmax and what the siblings drew there.

    logits [S, V] of the distribution that was sampled (temperature applied); for each of M draws its position [M]
    (0 <= . < S), token [M], both int64, and the reward [M] in [0, 1] of the rollout it belongs to. A draw belongs to a
    position only if its rollout has that very prefix. A token is worth the mean reward of the siblings that drew it.

    With value f on every token, Q = sum f p and weights R_j = f_j - Q on the distinct drawn tokens,
    dQ = (1/n) sum_j (f_j - Q)(R_j - S_R) p_j^2; on undrawn tokens R = 0 and f is only known to lie in [0, 1], so their
    part lies between -(1/n) S_R (1 - Q) U_2 and (1/n) S_R Q U_2.

    Siblings' means in place of both f and R would square their noise: a change of 0 would read as a gain. So `sampled`
    and `policy_gradient` are cross-fitted, unbiased, and of either sign; nan, unknown, where fewer than four siblings
    stand at the position.
    """
    # Distinct drawn tokens, each with the mean reward of the siblings that drew it.
    size, vocabulary = logits.shape
    p = torch.softmax(logits.double(), -1)  # [S, V]
    pair, inverse = torch.unique(position * vocabulary + token, return_inverse=True)  # one number per (position, token)
    where, reward = pair // vocabulary, reward.double()
    draws = _Draws(position, where, inverse, reward, size)
    value = draws.of_tokens(reward) / draws.of_tokens(torch.ones_like(reward))
    drawn = p[where, pair % vocabulary]  # their probabilities

    n = torch.bincount(position, minlength=size).double()  # siblings at each position
    if bool((n == 0).any()):
        raise ValueError("token_level: every position needs at least one draw")
    q = draws.of_positions(reward, position) / n

    # What was drawn: how much better each token is than the position's mean.
    better = value - q[where]
    square = drawn.square()
    s_r = draws.of_positions(better * drawn)

    # What was not: its values are unknown, so that its part has two ends.
    undrawn = _rest(p.square(), where, pair % vocabulary)
    ends = torch.stack([-s_r * (1 - q), s_r * q]) * undrawn / n  # f = 0 and f = 1 on every undrawn token of one class

    # What the steps of the surrogate and of REINFORCE are expected to change.
    surrogate = _surrogate_change(draws, drawn) / n
    reinforce = (n - 1) / n * _squared_covariance(draws, reward - q[position], n)

    return TokenLevel(
        siblings=n,
        success=q,
        unsampled_mass=_rest(p, where, pair % vocabulary),
        unsampled_2=undrawn,
        s_r=s_r,
        a2=draws.of_positions(square * (better > 0)),
        b2=draws.of_positions(square * (better < 0)),
        sampled=torch.where(n < 4, torch.nan, surrogate),
        unsampled_low=ends.amin(0),
        unsampled_high=ends.amax(0),
        policy_gradient=torch.where(n < 4, torch.nan, reinforce),
    )


@dataclass(frozen=True)
class _Draws:
    """M draws at S positions, of K distinct pairs of a position and a token."""

    position: Tensor  # [M] int64, of each draw
    where: Tensor  # [K] int64, the position of each pair
    pair: Tensor  # [M] int64, of each draw
    reward: Tensor  # [M] float64
    size: int  # S

    def of_tokens(self, values: Tensor) -> Tensor:
        """Sums [K] of values [M] over the draws of each pair."""
        return torch.zeros(len(self.where), dtype=torch.float64).index_add(0, self.pair, values)

    def of_positions(self, values: Tensor, where: Tensor | None = None) -> Tensor:
        """Sums [S] of values over what stands at each position, by default values [K] of pairs."""
        where = self.where if where is None else where
        return torch.zeros(self.size, dtype=torch.float64).index_add(0, where, values)

    def halves(self) -> Tensor:
        """0 or 1 for each draw [M], in turn at every position."""
        order = self.position.argsort(stable=True)
        count = torch.bincount(self.position, minlength=self.size)
        first = count.cumsum(0) - count  # where each position begins in that order
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order)) - first[self.position[order]]
        return rank % 2


def _surrogate_change(draws: _Draws, p: Tensor) -> Tensor:
    """n times the change of Q from tokens that half of the siblings drew, valued by the other half [S].

    p [K]: of each pair. One half takes the step, with its own means as R_j and its own S_R; the other estimates
    p_j (f_j - Q) without bias, by its draws' covariance of token and reward. The mean over both ways round.
    """
    half, sums = draws.halves(), draws.of_positions
    steps, worths = [], []
    for h in (0, 1):
        mine = (half == h).double()
        count, earned = draws.of_tokens(mine), draws.of_tokens(mine * draws.reward)
        n = sums(count)
        mean = (sums(earned) / n)[draws.where]
        worths.append((earned - count * mean) / (n - 1)[draws.where])
        # Where this half did not draw the token, the surrogate has no part for it.
        better = torch.where(count > 0, earned / count.clamp(min=1) - mean, 0.0)
        s_r = sums(better * p)[draws.where]
        steps.append(torch.where(count > 0, p * (better - s_r), 0.0))
    return sums(worths[0] * steps[1] + worths[1] * steps[0]) / 2


def _squared_covariance(draws: _Draws, centred: Tensor, n: Tensor) -> Tensor:
    """Unbiased estimate of sum_j Cov(token is j, reward)^2 = sum_j p_j^2 (f_j - Q)^2 at each position [S].

    The mean over all splits of n siblings in halves of the two halves' covariances multiplied: the unbiased estimate of
    the Hilbert-Schmidt independence criterion (Song et al. 2012, eq. 5) with the kernels "same token" and R R', both
    without their diagonals. centred [M]: rewards less the position's mean; n [S] siblings.
    """
    count, sums = draws.of_tokens(torch.ones_like(centred)), draws.of_positions
    first, second = draws.of_tokens(centred), draws.of_tokens(centred.square())
    # tr(K L), the sums of K and of L, and the sum of K L, from sums over tokens; the sum of L is that of -centred^2.
    both, spread = sums(first.square() - second), sums(second)
    same, mixed = sums(count * (count - 1)), -sums((count - 1) * second)
    return (both - same * spread / ((n - 1) * (n - 2)) - 2 * mixed / (n - 2)) / (n * (n - 3))


def _rest(values: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Sums [S] of values [S, V] without the given entries; added up, not subtracted, so that tiny ones survive."""
    values = values.clone()
    values[row, column] = 0
    return values.sum(-1)
