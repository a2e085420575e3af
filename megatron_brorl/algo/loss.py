"""The clipped policy loss, per token. Pure functions on tensors of R response tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) is far outside any clip range and far inside float32


SUMS = ("loss", "clipped_low", "clipped_high", "approx_kl", "entropy", "rollout_gap", "tokens")
MAXIMA = ("ratio_max", "rollout_gap_max")


@dataclass(frozen=True)
class PolicyLoss:
    """The loss and what people watch beside it."""

    loss: Tensor  # scalar, differentiable
    sums: dict[str, float]  # keys SUMS; over tokens, so that they add up over micro-batches and ranks
    maxima: dict[str, float]  # keys MAXIMA


def policy_loss(
    log_probs: Tensor,
    entropy: Tensor,
    old_log_probs: Tensor | None,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    divisor: float,
    eps_low: float,
    eps_high: float,
    is_cap: float,
) -> PolicyLoss:
    """Token-level clipped loss with clip-higher and truncated importance sampling; all tensors are [R].

    loss = -sum_t w_t min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t) / divisor,
    r_t = pi(t) / pi_old(t) (BroRL, section 3.1; DAPO, eq. 8), w_t = min(pi_old(t) / pi_rollout(t), is_cap) without
    gradient (Yao et al. 2025; is_cap = 0 means w_t = 1). old_log_probs = None says that the actor is still its own old
    policy, so r_t = 1 with the gradient of pi. divisor is the number of response tokens of the global batch, so that
    micro-batches and ranks add up. clipped_low and clipped_high count the tokens whose gradient the clipping removed;
    approx_kl is the k3 estimate of KL(pi_old || pi) (Schulman 2020); rollout_gap is |log pi - log pi_rollout|.
    """
    current = log_probs.detach()
    old = current if old_log_probs is None else old_log_probs
    log_ratio = (log_probs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high)
    mismatch = (old - rollout_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weight = mismatch.exp().clamp(max=is_cap) if is_cap else torch.ones_like(mismatch)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    loss = -(weight * objective).sum() / divisor
    with torch.no_grad():
        gap = (current - rollout_log_probs).abs()
        sums: dict[str, Tensor | int] = {
            "loss": loss.detach(),
            "clipped_low": ((ratio < 1 - eps_low) & (advantages < 0)).sum(),
            "clipped_high": ((ratio > 1 + eps_high) & (advantages > 0)).sum(),
            "approx_kl": (ratio - 1 - log_ratio).sum(),
            "entropy": entropy.sum(),
            "rollout_gap": gap.sum(),
            "tokens": len(ratio),
        }
        maxima: dict[str, Tensor] = {"ratio_max": ratio.max(), "rollout_gap_max": gap.max()} if len(ratio) else {}
    return PolicyLoss(loss, {k: float(v) for k, v in sums.items()}, {k: float(maxima.get(k, 0.0)) for k in MAXIMA})


def token_cross_entropy(log_probs: Tensor, divisor: float) -> Tensor:
    """Next-token loss of supervised training: -sum log p / divisor, divisor = tokens of the global batch."""
    return -log_probs.sum() / divisor
