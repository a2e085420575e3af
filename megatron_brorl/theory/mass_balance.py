"""Theorem 1 of BroRL: how one gradient step on a softmax changes the probability of the correct tokens.

N tokens are drawn from p = softmax(z) over V tokens, some of which are correct. All functions work on NumPy arrays and
torch tensors in float64, with any leading dimensions [...] in front of V.

    A, B    the distinct drawn tokens that are correct, incorrect; a token drawn twice counts once
    U       the tokens that were never drawn
    Q_pos   sum of p over all correct tokens, Q_neg = 1 - Q_pos
    S_R     sum of R_j p_j over A and B: the rewards of the drawn tokens, weighted by their probabilities
    A_2, B_2, U_pos,2, U_neg,2   sums of p^2 over A, B, the correct and the incorrect tokens of U

To first order a step dz of the logits changes Q_pos by sum_j p_j (f_j - Q_pos) dz_j with f_j = 1 on correct tokens and
0 elsewhere (`first_order`). `surrogate_step` is the step dz of the paper's objective, `score_step` that of the policy
gradient. docs/theory.md has the derivation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = TypeVar("Array", npt.NDArray[Any], Tensor)


@dataclass(frozen=True)
class Masses(Generic[Array]):
    """Probability masses and second moments for one set of draws; every field has the leading shape [...]."""

    n: Array  # number of draws, with repetitions
    p_pos: Array  # mass of A
    p_neg: Array  # mass of B
    u_pos: Array  # mass of the correct tokens of U
    u_neg: Array  # mass of the incorrect tokens of U
    a2: Array
    b2: Array
    u_pos2: Array
    u_neg2: Array

    @property
    def q_pos(self) -> Array:
        """Mass of all correct tokens."""
        return self.p_pos + self.u_pos

    @property
    def q_neg(self) -> Array:
        """Mass of all incorrect tokens."""
        return self.p_neg + self.u_neg


@dataclass(frozen=True)
class Terms(Generic[Array]):
    """The first-order change of Q_pos, split by token set; every field has the leading shape [...]."""

    s_r: Array  # sum of weight times probability over the drawn tokens
    sampled_right: Array
    sampled_wrong: Array
    unsampled: Array

    @property
    def total(self) -> Array:
        """The sum of the three parts."""
        return self.sampled_right + self.sampled_wrong + self.unsampled


def softmax(logits: Array) -> Array:
    """Probabilities [..., V] in float64."""
    z = _float64(logits)
    if isinstance(z, Tensor):
        return torch.softmax(z, -1)
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def masses(p: Array, counts: Array, correct: Array, incorrect: Array | None = None) -> Masses[Array]:
    """Return masses and second moments from probabilities, draw counts and the mask of correct tokens, each [..., V].

    incorrect: the mask of incorrect tokens, by default all that are not correct.
    """
    p = _float64(p)
    wrong = ~correct if incorrect is None else incorrect
    drawn, square = counts > 0, p * p
    return Masses(
        n=_float64(counts.sum(-1)),  # torch would divide by int64 in float32
        p_pos=(p * (drawn & correct)).sum(-1),
        p_neg=(p * (drawn & wrong)).sum(-1),
        u_pos=(p * (~drawn & correct)).sum(-1),
        u_neg=(p * (~drawn & wrong)).sum(-1),
        a2=(square * (drawn & correct)).sum(-1),
        b2=(square * (drawn & wrong)).sum(-1),
        u_pos2=(square * (~drawn & correct)).sum(-1),
        u_neg2=(square * (~drawn & wrong)).sum(-1),
    )


def theorem_1(m: Masses[Array], right: float, wrong: float, step: float) -> Terms[Array]:
    """The three terms of BroRL's Theorem 1 for rewards `right` on A, `wrong` on B, 0 on U, and step size `step`.

        dQ_pos = (step / N) [ (R_c - S_R) Q_neg A_2 + (S_R - R_w) Q_pos B_2 + S_R (Q_pos U_neg,2 - Q_neg U_pos,2) ]

    Exact to first order in `step` for one plain gradient step on J = (1/N) sum over A and B of R_j p_j. With
    right >= 0 >= wrong the first two terms cannot be negative, because the masses of A and B add up to at most 1.
    """
    s_r = right * m.p_pos + wrong * m.p_neg
    scale = step / m.n
    return Terms(
        s_r=s_r,
        sampled_right=scale * (right - s_r) * m.q_neg * m.a2,
        sampled_wrong=scale * (s_r - wrong) * m.q_pos * m.b2,
        unsampled=scale * s_r * (m.q_pos * m.u_neg2 - m.q_neg * m.u_pos2),
    )


def draw_weights(counts: Array, rewards: Array) -> Array:
    """Return the weights [..., V] of a loss that sums over draws: the token's reward times its number of draws."""
    return _float64(counts) * _float64(rewards)


def surrogate_step(p: Array, weights: Array, n: Array | float, step: float) -> Array:
    """Return the change of the logits [..., V] by one plain gradient step on J = (1/n) sum_j w_j p_j.

    dz_j = (step / n) p_j (w_j - S), S = sum_j w_j p_j. Weights are 0 on tokens that were not drawn; n has shape [...].
    """
    p, weights = _float64(p), _float64(weights)
    return step / _column(n) * p * (weights - (weights * p).sum(-1)[..., None])


def score_step(p: Array, weights: Array, n: Array | float, step: float) -> Array:
    """Return the step on (1/n) sum_j w_j log p_j, REINFORCE's objective: dz_j = (step / n) (w_j - p_j sum_k w_k).

    If the weights are rewards minus the group's mean, they add up to 0 and no undrawn logit changes.
    """
    p, weights = _float64(p), _float64(weights)
    return step / _column(n) * (weights - p * weights.sum(-1)[..., None])


def first_order(p: Array, change: Array, value: Array) -> Array:
    """Return each token's part [..., V] of the first-order change of Q = sum_j value_j p_j: p_j (value_j - Q) dz_j.

    change: dz, the change of the logits [..., V]. value [..., V]: the mask of correct tokens, or a success rate each.
    """
    p, value = _float64(p), _float64(value)
    q = (p * value).sum(-1)[..., None]
    return p * (value - q) * _float64(change)


def general_terms(p: Array, counts: Array, weights: Array, correct: Array, step: float) -> Terms[Array]:
    """Return the terms of Theorem 1 for any weights w on the drawn tokens; arrays are [..., V].

        dQ_pos = (step / N) [ Q_neg sum_{correct j} (w_j - S) p_j^2 + Q_pos sum_{incorrect j} (S - w_j) p_j^2 ]

    with S = sum_j w_j p_j. Exact to first order. S may lie outside [R_w, R_c], so no term has a guaranteed sign.
    """
    parts = first_order(p, surrogate_step(p, weights, counts.sum(-1), step), correct)
    drawn = counts > 0
    return Terms(
        s_r=(_float64(weights) * _float64(p)).sum(-1),
        sampled_right=(parts * (drawn & correct)).sum(-1),
        sampled_wrong=(parts * (drawn & ~correct)).sum(-1),
        unsampled=(parts * ~drawn).sum(-1),
    )


def missing(p: Array, n: int) -> Array:
    """Return the probability (1 - p)^n that n draws miss a token, [..., V]; exact for tiny p and for p = 1."""
    return _power(_float64(p), n, minus_one=False)


def expected_masses(p: Array, correct: Array, n: int) -> Masses[Array]:
    """Return the expectation of `masses` over n independent draws (Lemma 2 and Corollary 3 of BroRL).

    E[U_2] = sum p^2 (1 - p)^n. The drawn tokens have the rest, sum p^2 (1 - (1 - p)^n).
    """
    p = _float64(p)
    gone, seen = _power(p, n, minus_one=False), -_power(p, n, minus_one=True)
    square, wrong = p * p, ~correct
    return Masses(
        n=p.sum(-1) * 0 + n,
        p_pos=(p * seen * correct).sum(-1),
        p_neg=(p * seen * wrong).sum(-1),
        u_pos=(p * gone * correct).sum(-1),
        u_neg=(p * gone * wrong).sum(-1),
        a2=(square * seen * correct).sum(-1),
        b2=(square * seen * wrong).sum(-1),
        u_pos2=(square * gone * correct).sum(-1),
        u_neg2=(square * gone * wrong).sum(-1),
    )


def _power(p: Array, n: int, minus_one: bool) -> Array:
    """Return (1 - p)^n, or (1 - p)^n - 1 without cancellation."""
    if n < 0:
        raise ValueError(f"n = {n}: a number of draws cannot be negative")
    if n == 0:
        return p * 0 + (0.0 if minus_one else 1.0)
    if isinstance(p, Tensor):
        exponent = n * torch.log1p(-p)
        return torch.expm1(exponent) if minus_one else torch.exp(exponent)
    with np.errstate(divide="ignore"):  # p = 1: the logarithm is -inf and the power 0, as it should be
        exponent = n * np.log1p(-p)
    return np.expm1(exponent) if minus_one else np.exp(exponent)


def _float64(x: Array) -> Array:
    return x.double() if isinstance(x, Tensor) else np.asarray(x, dtype=np.float64)


def _column(n: Array | float) -> Array | float:
    return n if isinstance(n, (int, float)) else _float64(n)[..., None]
