"""What a group of siblings says about the mass that was not sampled. Pure functions; each result says how it is known.

exact      follows from the policy's own probabilities, no statistics involved
bound      holds whatever the undrawn tokens are worth
estimate   from the siblings alone, some with an interval (theory.intervals)

"Outcomes" are what counts as the same result: final answers, or whole responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_brorl.theory.intervals import unseen_mass, weighted_counts

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


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
    """The unseen outcomes of one group. Estimate, with the 95% interval of the mass that this group has not seen."""

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

    outcomes [N]: equal numbers are equal outcomes. n_1 / N is unbiased for the mass unseen by N - 1 siblings; the
    interval is intervals.unseen_mass.
    """
    counts, share = _counts(outcomes, right)
    n = len(outcomes)
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    low, high = unseen_mass(n, once, twice)
    mass, right_mass = once / n, float(share[counts == 1].sum()) / n
    return GoodTuring(len(counts), once, twice, mass, low, high, right_mass, mass - right_mass)


@dataclass(frozen=True)
class HoldOut:
    """Means over groups, for each number of siblings that were held out; every array is [H]. Estimates.

    Each is unbiased for its expectation over N - held_out fresh siblings: sum p (1 - p)^m, and sum p^2 (1 - p)^m over
    right and over wrong outcomes. low and high are the ends of the 95% interval over draws of siblings, the prompts
    being given.
    """

    held_out: Ints
    unsampled_mass: Floats
    unsampled_mass_low: Floats
    unsampled_mass_high: Floats
    u_pos2: Floats
    u_pos2_low: Floats
    u_pos2_high: Floats
    u_neg2: Floats
    u_neg2_low: Floats
    u_neg2_high: Floats


def hold_out(groups: Sequence[tuple[Ints, npt.NDArray[np.bool_]]], held_out: Sequence[int]) -> HoldOut:
    """Treat some siblings as unsampled, in every possible way at once, and see what they hold that the others lack.

    groups: outcomes [N] and verdicts [N] of each prompt; held_out: numbers h with 2 <= h < N for every group.

    The share of held-out siblings whose outcome none of the m = N - h others has, averaged over all choices of h
    siblings, is sum_j (c_j / N) C(N - c_j, m) / C(N - 1, m) for outcomes seen c_j times. With pairs of equal held-out
    siblings instead, it is sum_j c_j (c_j - 1) / (N (N - 1)) C(N - c_j, m) / C(N - 2, m). Either is a sum of functions
    g(c_j), that is, of the numbers of outcomes seen c times, each times g(c). The intervals take these numbers for
    Poisson counts (intervals.weighted_counts), of which multinomial ones vary less in all cases that the tests try;
    where nothing was seen the upper end is 3.69 times the largest g over the groups.
    """
    held = np.asarray(held_out, dtype=np.int64)  # [H]
    if not groups or held.size == 0:
        raise ValueError("hold_out: needs at least one group and one number of held-out siblings")

    # Sums over groups of g(c_j), of its squares for the intervals, and the largest g that a group could have had.
    sums = np.zeros((3, 2, held.size))  # of masses, right and wrong pairs; sums and squares
    largest = np.zeros((2, held.size))  # of masses and of pairs
    for outcomes, right in groups:
        n = len(outcomes)
        # Pairs take two held-out siblings, and one must remain to compare with.
        if held.min() < 2 or held.max() >= n:
            raise ValueError(f"hold_out: from {n} siblings 2 to {n - 1} can be held out, not {list(held_out)}")
        counts, share = _counts(outcomes, right)  # of each distinct outcome
        # Held-out siblings with new outcomes, alone and in pairs.
        one, two = unseen_weights(counts, n, n - held, 1), unseen_weights(counts, n, n - held, 2)
        parts = np.stack([one, two * share, two * (1 - share)])
        sums += np.stack([parts.sum(-1), np.square(parts).sum(-1)], axis=1)
        possible = np.arange(1, n + 1)
        most = np.stack([unseen_weights(possible, n, n - held, order).max(-1) for order in (1, 2)])
        largest = np.maximum(largest, most)

    # Means over groups, none above 1.
    g = len(groups)
    means = sums[:, 0] / g
    low, high = weighted_counts(means, sums[:, 1] / g**2, largest[[0, 1, 1]] / g)
    columns = np.minimum(np.stack([means, low, high], axis=1), 1.0)  # [3, 3, H]; a sum may be rounded up
    return HoldOut(held, *columns.reshape(9, -1))


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
