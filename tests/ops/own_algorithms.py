"""Published losses as functions of a user. Tests compare the built-in losses with the same formulas."""

from __future__ import annotations

import torch

EPS_LOW, EPS_HIGH = 0.2, 0.28


def clip(r, a):
    """Return min(r A, clip(r) A) by cases (Schulman et al. 2017, eq. 7)."""
    clipped = ((a > 0) & (r > 1 + EPS_HIGH)) | ((a < 0) & (r < 1 - EPS_LOW))
    return torch.where(clipped, r.detach().clamp(1 - EPS_LOW, 1 + EPS_HIGH), r) * a


def cispo(r, a):
    """Return A log pi, weighted by the clipped ratio without gradient (MiniMax-M1, eq. 4)."""
    return r.detach().clamp(1 - EPS_LOW, 1 + EPS_HIGH) * a * r.log()


def sapo(r, a):
    """Return 4 / tau sigmoid(tau (r - 1)) A (SAPO, Gao et al. 2025), where sigmoid(x) = (1 + tanh(x / 2)) / 2."""
    tau = 1.05 - 0.05 * (a > 0).double()
    return 2 / tau * (1 + (tau * (r - 1) / 2).tanh()) * a


BY_HAND = {"clip": clip, "cispo": cispo, "sapo": sapo}  # functions of ratio and advantage


def sequence_log_ratio(log_ratio, mask, sequence):
    """Return the mean log-ratio of each token's response (GSPO, Zheng et al. 2025, eq. 7)."""
    members = sequence == sequence.unique()[:, None]  # [sequences, tokens]
    sums = (members * log_ratio * mask).sum(1)
    return (sums / (members * mask).sum(1).clamp(min=1))[sequence.unique(return_inverse=True)[1]]


def token_loss(formula):
    def loss(log_probs, old_log_probs, advantages, **_):
        return -formula((log_probs - old_log_probs).exp(), advantages)

    return loss


def sequence_loss(formula):
    def loss(log_probs, old_log_probs, advantages, mask, entropy, sequence):
        return -formula(sequence_log_ratio(log_probs - old_log_probs, mask, sequence).exp(), advantages)

    return loss


clip_token, cispo_token, sapo_token = map(token_loss, BY_HAND.values())
gspo, cispo_sequence, sapo_sequence = map(sequence_loss, BY_HAND.values())
clip_sequence = gspo
