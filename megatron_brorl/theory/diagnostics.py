"""What a group of siblings says about the mass that was not sampled. Pure functions; each result says how it is known.

exact      follows from the policy's own probabilities, no statistics involved
bound      holds whatever the undrawn tokens are worth
estimate   from the siblings alone, with a standard error or an interval

"Outcomes" are what counts as the same result: final answers, or whole responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

Z95 = 1.959964


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
    sampled: Tensor  # change of Q from drawn tokens under BroRL's surrogate. Estimate: values are siblings' means
    unsampled_low: Tensor  # the change from undrawn tokens is at least this. Bound
    unsampled_high: Tensor  # and at most this. Bound
    policy_gradient: Tensor  # change of Q under REINFORCE with the group mean, where undrawn tokens have no part


def token_level(logits: Tensor, position: Tensor, token: Tensor, reward: Tensor) -> TokenLevel:
    """Mass balance at S positions from the policy's full softmax and what the siblings drew there.

    logits [S, V] of the distribution that was sampled (temperature applied); for each of M draws its position [M]
    (0 <= . < S), token [M], both int64, and the reward [M] in [0, 1] of the rollout it belongs to. A draw belongs to a
    position only if its rollout has that very prefix. A token is worth the mean reward of the siblings that drew it.

    With value f on every token, Q = sum f p and weights R_j = f_j - Q on the distinct drawn tokens,
    dQ = (1/n) sum_j (f_j - Q)(R_j - S_R) p_j^2; on undrawn tokens R = 0 and f is only known to lie in [0, 1], so their
    part lies between -(1/n) S_R (1 - Q) U_2 and (1/n) S_R Q U_2.
    """
    # Distinct drawn tokens, each with the mean reward of the siblings that drew it.
    size, vocabulary = logits.shape
    p = torch.softmax(logits.double(), -1)  # [S, V]
    pair, inverse = torch.unique(position * vocabulary + token, return_inverse=True)  # one number per (position, token)
    where, reward = pair // vocabulary, reward.double()
    count = torch.zeros(len(pair), dtype=torch.float64).index_add(0, inverse, torch.ones_like(reward))
    value = torch.zeros(len(pair), dtype=torch.float64).index_add(0, inverse, reward) / count
    drawn = p[where, pair % vocabulary]  # their probabilities

    # Sums over the tokens of a position.
    def total(x: Tensor) -> Tensor:
        return torch.zeros(size, dtype=torch.float64).index_add(0, where, x)

    n = total(count)  # siblings at each position
    if bool((n == 0).any()):
        raise ValueError("token_level: every position needs at least one draw")
    q = total(count * value) / n

    # What was drawn: how much better each token is than the position's mean.
    better = value - q[where]
    square = drawn.square()
    s_r = total(better * drawn)

    # What was not: its values are unknown, so that its part has two ends.
    undrawn = _rest(p.square(), where, pair % vocabulary)
    ends = torch.stack([-s_r * (1 - q), s_r * q]) * undrawn / n  # f = 0 and f = 1 on every undrawn token of one class

    return TokenLevel(
        siblings=n,
        success=q,
        unsampled_mass=_rest(p, where, pair % vocabulary),
        unsampled_2=undrawn,
        s_r=s_r,
        a2=total(square * (better > 0)),
        b2=total(square * (better < 0)),
        sampled=total(better * (better - s_r[where]) * square) / n,
        unsampled_low=ends.amin(0),
        unsampled_high=ends.amax(0),
        policy_gradient=total(drawn * better.square() * count) / n,
    )


def _rest(values: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Sums [S] of values [S, V] without the given entries; added up, not subtracted, so that tiny ones survive."""
    values = values.clone()
    values[row, column] = 0
    return values.sum(-1)


@dataclass(frozen=True)
class KnownMass:
    """What the log-probabilities of N responses say of the distribution over whole responses. All exact."""

    p_pos: float  # mass of the distinct right responses
    p_neg: float  # of the distinct wrong ones
    a2: float  # sum of p^2 over the distinct right ones
    b2: float
    unsampled_mass: float  # 1 - p_pos - p_neg


def known_mass(responses: Ints, log_probs: Floats, right: npt.NDArray[np.bool_]) -> KnownMass:
    """From codes of whole responses, their log-probabilities under the sampled distribution in nats, verdicts; [N]."""
    _, first = np.unique(responses, return_index=True)
    p, good = np.exp(log_probs[first]), right[first]
    return KnownMass(
        p_pos=float(p[good].sum()),
        p_neg=float(p[~good].sum()),
        a2=float(np.square(p[good]).sum()),
        b2=float(np.square(p[~good]).sum()),
        unsampled_mass=float(1 - p.sum()),
    )


@dataclass(frozen=True)
class GoodTuring:
    """The unseen outcomes of one group. Estimate, with the 95% interval of the mass that this group has not seen.

    low and high are nan, unknown, where all outcomes differ.
    """

    distinct: int
    singletons: int
    doubletons: int
    unseen_mass: float  # singletons / N
    low: float
    high: float
    unseen_right: float  # the part of unseen_mass on right outcomes
    unseen_wrong: float


def good_turing(outcomes: Ints, right: npt.NDArray[np.bool_]) -> GoodTuring:
    """Good-Turing estimate of the mass of outcomes that none of the N siblings had (Good 1953).

    outcomes [N]: equal numbers are equal outcomes. n_1 / N is unbiased for the mass unseen by N - 1 siblings. The
    interval is Esty's (1983), half-width 1.96 sqrt(n_1 (1 - n_1 / N) + 2 n_2) / N for n_1 outcomes seen once and n_2
    seen twice; its upper end is never below 1 - 0.025^(1/N), as N siblings cannot rule out a smaller mass. Where all
    outcomes differ the formula gives [1, 1]: a certainty that N draws without a repetition do not have, so nan.
    """
    counts, share = _counts(outcomes, right)
    n = len(outcomes)
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    mass = once / n
    half = Z95 * (once * (1 - mass) + 2 * twice) ** 0.5 / n
    right_mass = float(share[counts == 1].sum()) / n
    low, high = max(0.0, mass - half), min(1.0, max(mass + half, 1 - 0.025 ** (1 / n)))
    if once == n:
        low = high = float("nan")
    return GoodTuring(len(counts), once, twice, mass, low, high, right_mass, mass - right_mass)


@dataclass(frozen=True)
class HoldOut:
    """Means over groups, for each number of siblings that were held out; every array is [H]. Estimates.

    Each is unbiased for its expectation over N - held_out fresh siblings: sum p (1 - p)^m, and sum p^2 (1 - p)^m over
    right and over wrong outcomes. The standard errors are of the sampling of siblings, given the prompts, and rather
    too large than too small; nan, unknown, where nothing was seen that they could be estimated from.
    """

    held_out: Ints
    unsampled_mass: Floats
    unsampled_mass_se: Floats
    u_pos2: Floats
    u_pos2_se: Floats
    u_neg2: Floats
    u_neg2_se: Floats


def hold_out(groups: Sequence[tuple[Ints, npt.NDArray[np.bool_]]], held_out: Sequence[int]) -> HoldOut:
    """Treat some siblings as unsampled, in every possible way at once, and see what they hold that the others lack.

    groups: outcomes [N] and verdicts [N] of each prompt; held_out: numbers h with 2 <= h < N for every group.

    The share of held-out siblings whose outcome none of the m = N - h others has, averaged over all choices of h
    siblings, is sum_j (c_j / N) C(N - c_j, m) / C(N - 1, m) for outcomes seen c_j times. With pairs of equal held-out
    siblings instead, it is sum_j c_j (c_j - 1) / (N (N - 1)) C(N - c_j, m) / C(N - 2, m). Either is a sum of functions
    g(c_j). The standard errors are those of independent Poisson counts, whose variance is at most E[sum_j g(c_j)^2];
    multinomial counts vary less in all cases that the tests try. Where no held-out sibling, or no pair of them, was new
    to the others, that sum has no terms: an estimate of 0 whose error is unknown, not 0.
    """
    held = np.asarray(held_out, dtype=np.int64)  # [H]
    if not groups or held.size == 0:
        raise ValueError("hold_out: needs at least one group and one number of held-out siblings")

    # Sums over groups of g(c_j), and of its squares for the errors.
    sums: dict[str, Any] = {k: np.zeros(held.size) for k in ("u", "u_var", "pos", "pos_var", "neg", "neg_var")}
    for outcomes, right in groups:
        n = len(outcomes)
        # Pairs take two held-out siblings, and one must remain to compare with.
        if held.min() < 2 or held.max() >= n:
            raise ValueError(f"hold_out: from {n} siblings 2 to {n - 1} can be held out, not {list(held_out)}")
        counts, share = _counts(outcomes, right)  # of each distinct outcome
        # Held-out siblings with new outcomes, alone and in pairs.
        one, two = unseen_weights(counts, n, n - held, 1), unseen_weights(counts, n, n - held, 2)
        for name, parts in (("u", one), ("pos", two * share), ("neg", two * (1 - share))):
            sums[name] += parts.sum(-1)
            sums[f"{name}_var"] += np.square(parts).sum(-1)

    # Means over groups.
    g = len(groups)
    return HoldOut(
        held_out=held,
        unsampled_mass=sums["u"] / g,
        unsampled_mass_se=_errors(sums["u_var"]) / g,
        u_pos2=sums["pos"] / g,
        u_pos2_se=_errors(sums["pos_var"]) / g,
        u_neg2=sums["neg"] / g,
        u_neg2_se=_errors(sums["neg_var"]) / g,
    )


def _errors(variances: Floats) -> Floats:
    """Standard errors of sums; nan where nothing was added up."""
    return np.sqrt(np.where(variances > 0, variances, np.nan))


@dataclass(frozen=True)
class AnswerLevel:
    """Theorem 1 for one group whose tokens are its final answers, with the group mean as baseline. Estimates.

    A prompt's success rate is Q_pos of this softmax. Changes are per unit of the step size.
    """

    s_r: float
    a2: float  # sum of p^2 over right answers that were seen
    b2: float  # over wrong ones
    u_pos2: float  # over right answers that were not seen
    u_neg2: float
    sampled: float  # first and second term
    unsampled: float  # third term

    @property
    def change(self) -> float:
        """Of the success rate, all terms."""
        return self.sampled + self.unsampled


def answer_level(outcomes: Ints, right: npt.NDArray[np.bool_]) -> AnswerLevel:
    """From outcomes [N] and verdicts [N] of N >= 2 siblings; the formula is mass_balance.theorem_1.

    Rewards are 1 - s and -s for the success rate s. Masses not seen are Good-Turing's, their second moments those of
    two held-out siblings; both are unbiased, their products in the theorem's terms are plugged in.
    """
    counts, share = _counts(outcomes, right)
    n = len(outcomes)
    s = float(right.mean())

    # Unbiased estimates of the masses and second moments that enter the theorem.
    unseen = good_turing(outcomes, right)
    pairs = counts * (counts - 1.0) / (n * (n - 1.0))  # unbiased for p^2
    left = unseen_weights(counts, n, np.array([n - 2]), 2)[0]
    u_pos2, u_neg2 = float(left @ share), float(left @ (1 - share))
    a2, b2 = float(pairs @ share) - u_pos2, float(pairs @ (1 - share)) - u_neg2  # of outcomes that were seen

    # The theorem's terms.
    s_r = (1 - s) * (s - unseen.unseen_right) - s * (1 - s - unseen.unseen_wrong)
    sampled = ((1 - s - s_r) * (1 - s) * a2 + (s_r + s) * s * b2) / n
    return AnswerLevel(s_r, a2, b2, u_pos2, u_neg2, sampled, s_r * (s * u_neg2 - (1 - s) * u_pos2) / n)


def coupling(outcomes: Ints, right: npt.NDArray[np.bool_], sampled: Ints, order: int = 2) -> Floats:
    """Unbiased estimates of Q_pos E[U_neg,2] + Q_neg E[U_pos,2] at m = sampled [H] draws, m <= N - 1 - order.

    The third term of Theorem 1 is (step / N) S_R (Q_pos U_neg,2 - Q_neg U_pos,2): no larger than |S_R| times this.
    Three siblings are held out, two of them with one outcome, the third outside it and of the other verdict. With
    order = 1 only one sibling has the outcome, and the second moments become masses. A share of the whole coupling is a
    ratio of two such estimates and no longer unbiased.
    """
    n = len(outcomes)
    if sampled.max() > n - 1 - order:
        raise ValueError(f"coupling: {n} siblings allow m <= {n - 1 - order}, not {sampled.max()}")

    counts, share = _counts(outcomes, right)
    good = counts * share
    others_right = (good.sum() - good) / (n - order)
    others_wrong = ((counts - good).sum() - (counts - good)) / (n - order)

    tuples = counts / n if order == 1 else counts * (counts - 1.0) / (n * (n - 1.0))
    # Of the siblings that remain, counts - order have the outcome.
    absent = _absent(n - 1 - order, counts - order, sampled)
    found: Floats = (absent * tuples * ((1 - share) * others_right + share * others_wrong)).sum(-1)
    return found


def unseen_weights(counts: Ints, n: int, sampled: Ints, order: int) -> Floats:
    """[H, K]: probability that `order` of n siblings, picked at random, all have outcome k and none of m others has it.

    counts [K] of each outcome among the n; sampled [H] the numbers m <= n - order.
    """
    tuples = np.ones(len(counts))
    for i in range(order):
        tuples = tuples * (counts - i) / (n - i)
    return tuples * _absent(n - order, counts - order, sampled)


def _absent(n: int, counts: Ints, sampled: Ints) -> Floats:
    """C(n - c, m) / C(n, m) [H, K]: the chance that m of n miss all c of a kind; 0 for c < 0, which has no weight."""
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])  # log of factorials
    m = sampled[:, None]
    possible = (counts >= 0) & (n - counts - m >= 0)
    c = np.where(possible, counts, 0)
    rest = np.where(possible, n - c - m, 0)
    result: Floats = np.exp(np.where(possible, logs[n - c] - logs[rest] - logs[n] + logs[n - m], -np.inf))
    return result


def _counts(outcomes: Ints, right: npt.NDArray[np.bool_]) -> tuple[Ints, Floats]:
    """How often each distinct outcome came [K], and the share of right verdicts among its siblings [K]."""
    _, code, counts = np.unique(outcomes, return_inverse=True, return_counts=True)
    return counts.astype(np.int64), np.bincount(code, weights=right.astype(np.float64)) / counts
