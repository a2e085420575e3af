"""What the fused ops compute, in plain torch: any device, any floating dtype, gradients by autograd.

This file is the definition that csrc/ must agree with, in value and gradient; it holds the full [R, V] logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) is far outside any clip range and far inside float32

SUMS = ("loss", "clipped_low", "clipped_high", "approx_kl", "entropy", "rollout_gap", "tokens")
MAXIMA = ("ratio_max", "rollout_gap_max")


@dataclass(frozen=True)
class LinearPpoLoss:
    """The loss from hidden states on, and what people watch beside it."""

    loss: Tensor  # scalar, the only differentiable field
    log_probs: Tensor  # [R] of the given ids, nats
    entropy: Tensor  # [R] of the softmax, nats
    sums: dict[str, float]  # keys SUMS; over tokens, so that they add up over micro-batches and ranks
    maxima: dict[str, float]  # keys MAXIMA; 0 without tokens


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of everything that is not a matrix: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def linear_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of softmax(hidden @ weight.T / temperature) at each row.

    hidden [R, H]; weight [V, H], every row of which is in the vocabulary; ids [R] int64 below V. Returns two [R]
    tensors in the compute dtype, in nats. The log-probabilities are differentiable, the entropy is not.
    """
    compute = compute_dtype(hidden.dtype)
    all_log_probs = (hidden.to(compute) @ weight.to(compute).t() / temperature).log_softmax(dim=-1)
    with torch.no_grad():
        # A probability that underflows to 0 adds nothing, however small its logarithm.
        entropy = -(all_log_probs.exp() * all_log_probs).sum(dim=-1)
    return all_log_probs.gather(-1, ids.unsqueeze(-1)).squeeze(-1), entropy


def linear_ppo_loss(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    old_log_probs: Tensor | None,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    divisor: float,
    eps_low: float,
    eps_high: float,
    is_cap: float,
    temperature: float,
) -> LinearPpoLoss:
    """Token-level clipped loss with clip-higher and truncated importance sampling, from the hidden states on.

    hidden [R, H], weight [V, H], ids [R] as in linear_log_probs; the other tensors are [R] in the compute dtype.

    loss = -sum_t w_t min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t) / divisor,
    r_t = pi(t) / pi_old(t) (BroRL, section 3.1; DAPO, eq. 8), w_t = min(pi_old(t) / pi_rollout(t), is_cap) without
    gradient (Yao et al. 2025; is_cap = 0 means w_t = 1). old_log_probs = None says that the actor is still its own old
    policy, so r_t = 1 with the gradient of pi. divisor is the number of response tokens of the global batch.
    clipped_low and clipped_high count the tokens whose gradient the clipping removed; approx_kl is the k3 estimate of
    KL(pi_old || pi) (Schulman 2020); rollout_gap is |log pi - log pi_rollout|. Both log ratios are kept within
    +-MAX_LOG_RATIO, and beyond it a token has no gradient.
    """
    log_probs, entropy = linear_log_probs(hidden, weight, ids, temperature)
    current = log_probs.detach()
    old = current if old_log_probs is None else old_log_probs
    log_ratio = (log_probs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high)
    mismatch = (old - rollout_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    importance = mismatch.exp().clamp(max=is_cap) if is_cap else torch.ones_like(mismatch)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    loss = -(importance * objective).sum() / divisor
    with torch.no_grad():
        gap = (current - rollout_log_probs).abs()
        values: tuple[Tensor | int, ...] = (
            loss,
            ((ratio < 1 - eps_low) & (advantages < 0)).sum(),
            ((ratio > 1 + eps_high) & (advantages > 0)).sum(),
            (ratio - 1 - log_ratio).sum(),
            entropy.sum(),
            gap.sum(),
            len(ratio),
        )
        sums = {key: float(value) for key, value in zip(SUMS, values, strict=True)}
        most: tuple[Tensor | int, ...] = (ratio.max(), gap.max()) if len(ratio) else (0, 0)
        maxima = {key: float(value) for key, value in zip(MAXIMA, most, strict=True)}
    return LinearPpoLoss(loss, current, entropy, sums, maxima)
