"""Theorem 1 of BroRL: how one gradient step on a softmax changes the probability of the correct tokens.

N tokens are drawn from p = softmax(z) over V tokens, some of which are correct. All functions compute in float64, with
any leading dimensions [...] in front of V.

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

import torch
from torch import Tensor


@dataclass(frozen=True)
class Masses:
    """Probability masses and second moments for one set of draws; every field has the leading shape [...]."""

    n: Tensor  # number of draws, with repetitions
    p_pos: Tensor  # mass of A
    p_neg: Tensor  # mass of B
    u_pos: Tensor  # mass of the correct tokens of U
    u_neg: Tensor  # mass of the incorrect tokens of U
    a2: Tensor
    b2: Tensor
    u_pos2: Tensor
    u_neg2: Tensor

    @property
    def q_pos(self) -> Tensor:
        """Mass of all correct tokens."""
        return self.p_pos + self.u_pos

    @property
    def q_neg(self) -> Tensor:
        """Mass of all incorrect tokens."""
        return self.p_neg + self.u_neg


@dataclass(frozen=True)
class Terms:
    """The first-order change of Q_pos, split by token set; every field has the leading shape [...]."""

    s_r: Tensor  # sum of weight times probability over the drawn tokens
    sampled_right: Tensor
    sampled_wrong: Tensor
    unsampled: Tensor

    @property
    def total(self) -> Tensor:
        """The sum of the three parts."""
        return self.sampled_right + self.sampled_wrong + self.unsampled


def masses(p: Tensor, counts: Tensor, correct: Tensor) -> Masses:
    """Return the masses for probabilities, draw counts and the mask of correct tokens, each [..., V]."""
    drawn = counts > 0
    return _masses(p.double(), drawn, ~drawn, counts.sum(-1), correct)


def expected_masses(p: Tensor, correct: Tensor, n: int) -> Masses:
    """Return the expectation of `masses` over n independent draws (Lemma 2 and Corollary 3 of BroRL).

    E[U_2] = sum p^2 (1 - p)^n. The drawn tokens have the rest, sum p^2 (1 - (1 - p)^n).
    """
    p = p.double()
    logs = torch.special.xlog1py(n, -p)  # exact for tiny p and for p = 1
    return _masses(p, -logs.expm1(), logs.exp(), torch.full(p.shape[:-1], n), correct)


def _masses(p: Tensor, drawn: Tensor, gone: Tensor, n: Tensor, correct: Tensor) -> Masses:
    """drawn, gone [..., V]: whether, or with which probability, a token was drawn and was not."""
    square = p * p
    return Masses(
        n=n.double(),
        p_pos=(p * drawn * correct).sum(-1),
        p_neg=(p * drawn * ~correct).sum(-1),
        u_pos=(p * gone * correct).sum(-1),
        u_neg=(p * gone * ~correct).sum(-1),
        a2=(square * drawn * correct).sum(-1),
        b2=(square * drawn * ~correct).sum(-1),
        u_pos2=(square * gone * correct).sum(-1),
        u_neg2=(square * gone * ~correct).sum(-1),
    )


def theorem_1(m: Masses, right: float, wrong: float, step: float) -> Terms:
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


def surrogate_step(p: Tensor, weights: Tensor, n: Tensor, step: float) -> Tensor:
    """Return the change of the logits [..., V] by one plain gradient step on J = (1/n) sum_j w_j p_j.

    dz_j = (step / n) p_j (w_j - S), S = sum_j w_j p_j. Weights are 0 on tokens that were not drawn; n has shape [...].
    For a loss that sums over draws, a weight is the reward of a token times its number of draws.
    """
    p = p.double()
    return step / n.double()[..., None] * p * (weights - (weights * p).sum(-1)[..., None])


def score_step(p: Tensor, weights: Tensor, n: Tensor, step: float) -> Tensor:
    """Return the step on (1/n) sum_j w_j log p_j, REINFORCE's objective: dz_j = (step / n) (w_j - p_j sum_k w_k).

    If the weights are rewards minus the group's mean, they add up to 0 and no undrawn logit changes.
    """
    return step / n.double()[..., None] * (weights - p.double() * weights.sum(-1)[..., None])


def first_order(p: Tensor, change: Tensor, value: Tensor) -> Tensor:
    """Return each token's part [..., V] of the first-order change of Q = sum_j value_j p_j: p_j (value_j - Q) dz_j.

    change: dz, the change of the logits [..., V]. value [..., V]: the mask of correct tokens, or a success rate each.
    """
    p = p.double()
    value = value.double()
    return p * (value - (p * value).sum(-1)[..., None]) * change


def general_terms(p: Tensor, counts: Tensor, weights: Tensor, correct: Tensor, step: float) -> Terms:
    """Return the terms of Theorem 1 for any weights w on the drawn tokens; tensors are [..., V].

        dQ_pos = (step / N) [ Q_neg sum_{correct j} (w_j - S) p_j^2 + Q_pos sum_{incorrect j} (S - w_j) p_j^2 ]

    with S = sum_j w_j p_j. Exact to first order. S may lie outside [R_w, R_c], so no term has a guaranteed sign.
    """
    parts = first_order(p, surrogate_step(p, weights, counts.sum(-1), step), correct)
    drawn = counts > 0
    return Terms(
        s_r=(weights * p.double()).sum(-1),
        sampled_right=(parts * (drawn & correct)).sum(-1),
        sampled_wrong=(parts * (drawn & ~correct)).sum(-1),
        unsampled=(parts * ~drawn).sum(-1),
    )
