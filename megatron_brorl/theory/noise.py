"""Where the noise of a step's gradient comes from, and what one prompt's update does to another's right answers.

A prompt's gradient g from n siblings is that of its success rate by REINFORCE with leave-one-out baselines,
sum (r - mean r) grad log p / (n - 1): given the prompt its mean m is the true one at any n >= 2. Of P prompts drawn at
random, the mean gradient has the variance (its trace, as everywhere here)

    ( Var_prompts(m)  +  E Var(g | prompt) ) / P  =  ( between + within / (n - 1) ) / P

between is what more siblings cannot lower. within / (n - 1) is exact for rewards and scores that are independent
(advisor); a U-statistic's variance has a term in 1 / n^2 besides, so that `within` is that of the n it was measured at.

Two halves of a prompt's siblings, each with its own baseline, are independent given the prompt. So the inner product
of their gradients has the mean |m|^2, the squared distance between them that of two variances, and the inner product of
two prompts' gradients <m, m'>. |m|^2 is also the rate at which a plain gradient step on a prompt raises its own success
rate, and <m, m'> that at which it raises another prompt's: below 0 it takes right answers away.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class HalfGradients:
    """Inner products of the gradients a and b of two halves of one prompt's siblings."""

    agreement: float  # <a, b>
    distance: float  # |a - b|^2
    with_others: float  # <(a + b) / 2, sum of (a' + b') / 2 over the prompts that were taken before this one>
    siblings: tuple[int, int]  # in either half, at least 2


@dataclass(frozen=True)
class GradientNoise:
    """Unbiased estimates over prompts as they are drawn, those without a signal among them; nan: unknown.

    Each may be below 0 by chance.
    """

    own_effect: float  # on a prompt's success rate, per unit of a plain gradient step on it
    other_effect: float  # on another prompt's, likewise
    between: float  # variance of a prompt's true gradient over prompts
    within: float  # times 1 / (n - 1): variance of its gradient from n siblings, mean over prompts


def gradient_noise(found: Sequence[HalfGradients], kept: int, closed: int) -> GradientNoise:
    """From prompts taken at random out of `kept` with a signal, among `closed` drawn ones. Raises ValueError.

    The others have equal rewards: a gradient of exactly 0 in both halves. They count, as dropping them would be
    choosing by the draws.
    """
    taken = len(found)
    if not taken <= kept <= closed or (kept and not taken):
        raise ValueError(f"gradient_noise: {taken} of {kept} prompts with a signal among {closed}")
    if closed < 2 or (kept > 1 and taken < 2):
        return GradientNoise(*[math.nan] * 4)  # there are no pairs of prompts

    # Means over the prompts with a signal, as part of all.
    share = kept / closed / max(taken, 1)
    own = share * sum(f.agreement for f in found)
    within = share * sum(f.distance / sum(1 / (n - 1) for n in f.siblings) for f in found)

    # And over their pairs, as part of all pairs.
    pairs = kept * (kept - 1) / (closed * (closed - 1)) / max(taken * (taken - 1) / 2, 1)
    others = pairs * sum(f.with_others for f in found)
    return GradientNoise(own, others, own - others, within)
