"""The mass balance at single positions, from the policy's softmax and the tokens that siblings with one prefix drew."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLevel:
    """The mass balance at S positions; every field is [S] float64. Changes are per unit of the step size.

    A token's value is the mean reward of the siblings that drew it. `exact` fields depend on the policy's
    probabilities and these values only; `bound` fields hold for any values of the undrawn tokens.
    """

    siblings: Tensor  # exact: n, rollouts that share the prefix
    success: Tensor  # estimate: Q, the mean reward of these rollouts
    unsampled_mass: Tensor  # exact: sum of p over tokens that no sibling drew
    unsampled_2: Tensor  # exact: U_2 = sum of p^2 over tokens that no sibling drew
    s_r: Tensor  # exact: S_R = sum of (value - Q) p over drawn tokens
    a2: Tensor  # exact: sum of p^2 over drawn tokens with a value above Q
    b2: Tensor  # exact: sum of p^2 over drawn tokens with a value below Q
    sampled: Tensor  # estimate: change of Q by BroRL's surrogate from tokens that half of the siblings drew
    unsampled_low: Tensor  # bound: lower end of the change of Q from undrawn tokens
    unsampled_high: Tensor  # bound: upper end of the change of Q from undrawn tokens
    policy_gradient: Tensor  # estimate: change of Q by REINFORCE with the group mean, which moves no undrawn logit


def token_level(logits: Tensor, position: Tensor, token: Tensor, reward: Tensor) -> TokenLevel:
    """Compute the mass balance at S positions.

    logits [S, V]: of the distribution that was sampled, with the temperature applied. Each of M draws has its position
    [M] int64 in [0, S), its token [M] int64 and the reward [M] in [0, 1] of its rollout. A draw belongs to a position
    if its rollout has exactly that prefix.

    With the value f of every token, Q = sum f p and weights R_j = f_j - Q on the distinct drawn tokens,
    dQ = (1/n) sum_j (f_j - Q)(R_j - S_R) p_j^2. On undrawn tokens R = 0 and f is only known to lie in [0, 1], so their
    part lies between -(1/n) S_R (1 - Q) U_2 and (1/n) S_R Q U_2.

    Using siblings' means for both f and R would square their noise and read a change of 0 as a gain. `sampled` and
    `policy_gradient` are therefore cross-fitted: unbiased, of either sign, and nan where fewer than four siblings share
    the position.

    Raises ValueError if a position has no draw.
    """
    size, vocabulary = logits.shape
    p = torch.softmax(logits.double(), -1)  # [S, V]
    pair, inverse = torch.unique(position * vocabulary + token, return_inverse=True)  # distinct (position, token)
    pair_position = pair // vocabulary
    pair_token = pair % vocabulary
    draws = _Draws(position, pair_position, inverse, reward.double(), size)
    draw_count = draws.sum_by_pair(torch.ones_like(draws.reward))

    n = draws.sum_by_position(draw_count)
    if bool((n == 0).any()):
        raise ValueError("token_level: every position needs at least one draw")
    q = draws.sum_by_position(draws.reward, position) / n

    undrawn = torch.ones_like(p)
    weight = torch.zeros_like(p)  # R_j of the drawn tokens
    undrawn[pair_position, pair_token] = 0
    weight[pair_position, pair_token] = draws.sum_by_pair(draws.reward) / draw_count - q[pair_position]
    square = p * p
    unsampled_2 = (square * undrawn).sum(-1)
    s_r = (weight * p).sum(-1)
    ends = torch.stack([-s_r * (1 - q), s_r * q]) * unsampled_2 / n  # for f = 0 and f = 1 on every undrawn token

    surrogate = _surrogate_change(draws, p[pair_position, pair_token]) / n
    reinforce = (n - 1) / n * _squared_covariance(draws, draws.reward - q[position], n)
    return TokenLevel(
        siblings=n,
        success=q,
        unsampled_mass=(p * undrawn).sum(-1),
        unsampled_2=unsampled_2,
        s_r=s_r,
        a2=(square * (weight > 0)).sum(-1),
        b2=(square * (weight < 0)).sum(-1),
        sampled=torch.where(n < 4, torch.nan, surrogate),
        unsampled_low=ends.amin(0),
        unsampled_high=ends.amax(0),
        policy_gradient=torch.where(n < 4, torch.nan, reinforce),
    )


@dataclass(frozen=True)
class _Draws:
    """M draws at S positions with K distinct (position, token) pairs."""

    position: Tensor  # [M] int64
    pair_position: Tensor  # [K] int64, the position of each pair
    pair: Tensor  # [M] int64, the pair of each draw
    reward: Tensor  # [M] float64
    size: int  # S

    def sum_by_pair(self, values: Tensor) -> Tensor:
        """Sum values [M] over the draws of each pair, [K]."""
        return torch.zeros(len(self.pair_position), dtype=torch.float64).index_add(0, self.pair, values)

    def sum_by_position(self, values: Tensor, position: Tensor | None = None) -> Tensor:
        """Sum values by position, [S]. position: of each value; None if the values [K] belong to the pairs."""
        position = self.pair_position if position is None else position
        return torch.zeros(self.size, dtype=torch.float64).index_add(0, position, values)

    def halves(self) -> Tensor:
        """Assign the draws of every position to halves 0 and 1 in turn, [M]."""
        order = self.position.argsort(stable=True)
        counts = torch.bincount(self.position, minlength=self.size)
        first = counts.cumsum(0) - counts  # index of the first draw of each position in that order
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order)) - first[self.position[order]]
        return rank % 2


def _surrogate_change(draws: _Draws, p: Tensor) -> Tensor:
    """Return n dQ = sum_j p_j (f_j - Q) p_j (R_j - S_R) over the tokens j that one half of the siblings drew, [S].

    p [K]: the probability of each pair. The symbols are those of token_level. The steps p_j (R_j - S_R) come from one
    half of the siblings. The covariances of token and reward in the other half estimate p_j (f_j - Q) without bias.
    The result is the mean over both assignments of the halves.
    """
    half = draws.halves()
    steps = []
    covariances = []
    for h in (0, 1):
        in_half = (half == h).double()
        pair_count = draws.sum_by_pair(in_half)  # draws of this half, [K]
        pair_reward = draws.sum_by_pair(in_half * draws.reward)
        count = draws.sum_by_position(pair_count)[draws.pair_position]  # draws of this half at the pair's position, [K]
        q = draws.sum_by_position(pair_reward)[draws.pair_position] / count
        covariances.append((pair_reward - pair_count * q) / (count - 1))
        # Tokens that this half did not draw have R_j = 0, and their steps are not part of the sum.
        r_j = torch.where(pair_count > 0, pair_reward / pair_count.clamp(min=1) - q, 0.0)
        s_r = draws.sum_by_position(r_j * p)[draws.pair_position]
        steps.append(torch.where(pair_count > 0, p * (r_j - s_r), 0.0))
    return draws.sum_by_position(covariances[0] * steps[1] + covariances[1] * steps[0]) / 2


def _squared_covariance(draws: _Draws, centred: Tensor, n: Tensor) -> Tensor:
    """Return an unbiased estimate of sum_j Cov(token is j, reward)^2 = sum_j p_j^2 (f_j - Q)^2, [S].

    This is the Hilbert-Schmidt independence criterion (Song et al. 2012, eq. 5) of two matrices over pairs of siblings
    with zero diagonals: K is 1 for the same token, L is the product of the centred rewards. It equals the mean, over
    all splits of the siblings into halves, of the product of both halves' covariances.
    centred [M]: rewards minus the position's mean; n [S]: siblings.
    """
    pair_count = draws.sum_by_pair(torch.ones_like(centred))
    pair_squares = draws.sum_by_pair(centred.square())
    # tr(K L) and the sums of K, L and K L follow from sums over tokens. The sum of L is minus that of centred^2.
    trace_kl = draws.sum_by_position(draws.sum_by_pair(centred).square() - pair_squares)
    minus_sum_l = draws.sum_by_position(pair_squares)
    sum_k = draws.sum_by_position(pair_count * (pair_count - 1))
    sum_kl = -draws.sum_by_position((pair_count - 1) * pair_squares)
    return (trace_kl - sum_k * minus_sum_l / ((n - 1) * (n - 2)) - 2 * sum_kl / (n - 2)) / (n * (n - 3))


@dataclass(frozen=True)
class Positions:
    """K positions of one group, drawn at random from its tokens whose prefix at least two siblings share."""

    sibling: Tensor  # [K] int64, one sibling with the prefix
    depth: Tensor  # [K] int64, length of the prefix in tokens
    together: Tensor  # [K, N] bool, the siblings with exactly that prefix and a sampled token after it
    shared: int  # sampled tokens with a shared prefix; if 0, K is 0


def draw_positions(tokens: Tensor, uniforms: Tensor, sampled: Tensor | None = None) -> Positions:
    """Draw one position per number of `uniforms` [K] in [0, 1), uniformly from the shared tokens, with replacement.

    tokens [N, D] int64: the first tokens of each sibling's response, -1 after its end and for a lost sibling. sampled
    [N, D] bool: false for padding and for tokens of an environment, which are part of prefixes only. None: all tokens.
    """
    nodes, shared = _prefixes(tokens)
    sampled = tokens >= 0 if sampled is None else sampled
    candidates = (shared & sampled).nonzero()
    if not len(candidates):
        empty = torch.zeros(0, dtype=torch.int64)
        return Positions(empty, empty, torch.zeros(0, len(tokens), dtype=torch.bool), shared=0)
    sibling, depth = candidates[(uniforms * len(candidates)).long()].unbind(1)
    same_prefix = nodes[:, depth] == nodes[sibling, depth]
    return Positions(sibling, depth, (same_prefix & sampled[:, depth]).t(), len(candidates))


def _prefixes(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return a number for the prefix before each token, [N, D], and a mask [N, D] of the shared ones."""
    node = torch.zeros(len(tokens), dtype=torch.int64)
    nodes = torch.zeros_like(tokens)
    shared = torch.zeros_like(tokens, dtype=torch.bool)
    kinds = int(tokens.max()) + 2  # values that a token can have, -1 included
    for t in range(tokens.shape[1]):
        alive = tokens[:, t] >= 0
        nodes[:, t] = node
        shared[:, t] = alive & (torch.bincount(node[alive], minlength=len(tokens)) >= 2)[node]
        if not shared[:, t].any():
            break  # A longer prefix cannot be shared either.
        _, node = torch.unique(node * kinds + tokens[:, t], return_inverse=True)
    return nodes, shared
