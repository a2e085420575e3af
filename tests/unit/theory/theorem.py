"""Theorem 1 of BroRL: how one gradient step on a softmax changes the probability of the correct tokens.

N tokens are drawn from p = softmax(z) over V tokens, some of which are correct. All functions compute in float64, with
any leading dimensions [...] in front of V.

    A, B    the distinct drawn tokens that are correct, incorrect; a token drawn twice counts once
    U       the tokens that were never drawn
    Q_pos   sum of p over all correct tokens, Q_neg = 1 - Q_pos
    S_R     sum of R_j p_j over A and B: the rewards of the drawn tokens, weighted by their probabilities
    A_2, B_2, U_pos,2, U_neg,2   sums of p^2 over A, B, the correct and the incorrect tokens of U

To first order a step dz of the logits changes Q_pos by sum_j p_j (f_j - Q_pos) dz_j with f_j = 1 on correct tokens and
0 elsewhere (`first_order`). docs/theory.md has the derivation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Masses(NamedTuple):
    """Probability masses and second moments for one set of draws; every field has the leading shape [...]."""

    p_pos: Tensor  # mass of A
    p_neg: Tensor  # mass of B
    u_pos: Tensor  # mass of the correct tokens of U
    u_neg: Tensor  # mass of the incorrect tokens of U
    a2: Tensor
    b2: Tensor
    u_pos2: Tensor
    u_neg2: Tensor


class Terms(NamedTuple):
    """The first-order change of Q_pos, split by token set; every field has the leading shape [...]."""

    sampled_right: Tensor
    sampled_wrong: Tensor
    unsampled: Tensor

    @property
    def total(self) -> Tensor:
        """The sum of the three parts."""
        return self.sampled_right + self.sampled_wrong + self.unsampled


def masses(p: Tensor, counts: Tensor, correct: Tensor) -> Masses:
    """Return the masses for probabilities, draw counts and the mask of correct tokens, each [..., V]."""
    return _masses(p, counts > 0, counts == 0, correct)


def expected_masses(p: Tensor, correct: Tensor, n: int) -> Masses:
    """Return the expectation of `masses` over n independent draws (Lemma 2 and Corollary 3 of BroRL).

    E[U_2] = sum p^2 (1 - p)^n. The drawn tokens have the rest, sum p^2 (1 - (1 - p)^n).
    """
    logs = torch.special.xlog1py(n, -p.double())  # exact for tiny p and for p = 1
    return _masses(p, -logs.expm1(), logs.exp(), correct)


def _masses(p: Tensor, drawn: Tensor, gone: Tensor, correct: Tensor) -> Masses:
    """drawn, gone [..., V]: whether, or with which probability, a token was drawn and was not."""
    p = p.double()
    return Masses(
        *((x * part * side).sum(-1) for x in (p, p * p) for part in (drawn, gone) for side in (correct, ~correct))
    )


def theorem_1(m: Masses, n: Tensor, right: float, wrong: float, step: float) -> Terms:
    """The three terms of BroRL's Theorem 1 for n draws, rewards `right` on A, `wrong` on B, 0 on U, and a step size.

        dQ_pos = (step / N) [ (R_c - S_R) Q_neg A_2 + (S_R - R_w) Q_pos B_2 + S_R (Q_pos U_neg,2 - Q_neg U_pos,2) ]

    Exact to first order in `step` for one plain gradient step on J = (1/N) sum over A and B of R_j p_j. With
    right >= 0 >= wrong the first two terms cannot be negative, because the masses of A and B add up to at most 1.
    """
    s_r = right * m.p_pos + wrong * m.p_neg
    scale, q_pos, q_neg = step / n.double(), m.p_pos + m.u_pos, m.p_neg + m.u_neg
    return Terms(
        scale * (right - s_r) * q_neg * m.a2,
        scale * (s_r - wrong) * q_pos * m.b2,
        scale * s_r * (q_pos * m.u_neg2 - q_neg * m.u_pos2),
    )


def surrogate_step(p: Tensor, weights: Tensor, n: Tensor, step: float) -> Tensor:
    """Return the change of the logits [..., V] by one plain gradient step on J = (1/n) sum_j w_j p_j.

    dz_j = (step / n) p_j (w_j - S), S = sum_j w_j p_j. Weights are 0 on tokens that were not drawn; n has shape [...].
    For a loss that sums over draws, a weight is the reward of a token times its number of draws.
    """
    p = p.double()
    return step / n.double()[..., None] * p * (weights - (weights * p).sum(-1)[..., None])


def first_order(p: Tensor, change: Tensor, correct: Tensor) -> Tensor:
    """Return each token's part [..., V] of the first-order change of Q_pos by a change of the logits [..., V]."""
    p = p.double()
    return p * (correct.double() - (p * correct).sum(-1)[..., None]) * change


def general_terms(p: Tensor, counts: Tensor, weights: Tensor, correct: Tensor, step: float) -> Terms:
    """Return the terms of Theorem 1 for any weights w on the drawn tokens; tensors are [..., V].

        dQ_pos = (step / N) [ Q_neg sum_{correct j} (w_j - S) p_j^2 + Q_pos sum_{incorrect j} (S - w_j) p_j^2 ]

    with S = sum_j w_j p_j. Exact to first order. S may lie outside [R_w, R_c], so no term has a guaranteed sign.
    """
    parts = first_order(p, surrogate_step(p, weights, counts.sum(-1), step), correct)
    drawn = counts > 0
    sets = (drawn & correct, drawn & ~correct, ~drawn)
    return Terms(*((parts * tokens).sum(-1) for tokens in sets))
