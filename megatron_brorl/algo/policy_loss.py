"""The losses of the actor from log-probabilities on. Pure functions on tensors of R response tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_brorl.algo.kl import MAX_LOG_RATIO, kl_estimate
from megatron_brorl.algo.policy_losses import PolicyLossSettings, policy_loss_entry

SUMS = (
    "loss",
    "clipped_low",
    "clipped_high",
    "clipped_dual",
    "approx_kl",
    "reference_kl",
    "rollout_gap",
    "ratio",
    "entropy",
    "tokens",
)
MAXIMA = ("ratio_max", "rollout_gap_max")


@dataclass(frozen=True)
class PolicyTokens:
    """What the loss knows of each of R response tokens, beside the policy; log-probabilities in nats."""

    rollout_log_probs: Tensor  # [R] when sampled
    advantages: Tensor  # [R]
    weights: Tensor  # [R] of the token in the loss (aggregation.token_weights); 0 masks it, whatever else it holds
    old_log_probs: Tensor | None = None  # [R]; None: the actor is still its own old policy
    reference_log_probs: Tensor | None = None  # [R]; needed where kl_coef is not 0
    sequences: Tensor | None = None  # [R] int64, which sequence of the batch; needed where ratio is "sequence"

    def where(self, live: Tensor | slice) -> PolicyTokens:
        """The tokens that `live` selects: a mask [R] bool or a slice."""
        selected: dict[str, Any] = {k: None if v is None else v[live] for k, v in vars(self).items()}
        return PolicyTokens(**selected)


@dataclass(frozen=True)
class PolicyLoss:
    """The loss, and what people watch beside it."""

    loss: Tensor  # scalar, the only differentiable field
    log_probs: Tensor  # [R] of the tokens, nats
    entropy: Tensor  # [R] of the distributions they were drawn from, nats
    sums: dict[str, float]  # keys SUMS; over live tokens, so that they add up over micro-batches and ranks
    maxima: dict[str, float]  # keys MAXIMA; 0 without tokens


def policy_loss(log_probs: Tensor, entropy: Tensor, tokens: PolicyTokens, settings: PolicyLossSettings) -> PolicyLoss:
    """The policy loss from log-probabilities and entropies [R], both in nats.

    loss = sum_t weight_t (-u_t f(r_t, A_t) + kl_coef KL_t - entropy_coef H_t), where f is the entry of
    settings.policy_loss in algo.policy_losses; u_t = min(pi_old / pi_rollout, is_cap) without gradient (Yao et al.
    2025); KL_t by kl_estimate. r_t = pi(t) / pi_old(t), or with ratio = "sequence" the geometric mean of these over
    the sequence (GSPO, Zheng et al. 2025, eq. 7). Without old_log_probs r_t = 1 with the gradient of pi.

    The entropy bonus has a gradient only if `entropy` has one. clipped_* count the tokens that each bound of f
    changes; approx_kl is the k3 estimate of KL(pi_old || pi), reference_kl the chosen one of KL(pi || pi_ref);
    rollout_gap is |log pi - log pi_rollout|. Raises ValueError for settings that need what tokens lack.
    """
    given = log_probs.detach(), entropy.detach()
    # Masked tokens are taken out, not multiplied by 0: what they hold may be NaN.
    live = tokens.weights != 0
    log_probs, entropy, tokens = log_probs[live], entropy[live], tokens.where(live)
    current, advantages = log_probs.detach(), tokens.advantages

    # The importance ratio to the policy that the optimizer steps of this batch began with.
    old = current if tokens.old_log_probs is None else tokens.old_log_probs
    # Without an old policy this is 0 and still has the gradient of log pi.
    log_ratio = log_probs - old
    if settings.ratio == "sequence":
        if tokens.sequences is None:
            raise ValueError('policy_loss: ratio = "sequence" needs tokens.sequences')
        log_ratio = _mean_of_sequences(log_ratio, tokens.sequences)
    # Kept finite, far outside any clip range.
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()

    # What the chosen loss makes of it, weighted for what engine and trainer disagree on.
    objective = policy_loss_entry(settings.policy_loss).formula(ratio, advantages, settings)
    value = objective.value
    if settings.is_cap:
        # Equal first: the difference of two infinities is NaN. A constant, since neither policy is trained here.
        gap = torch.where(old == tokens.rollout_log_probs, 0.0, old - tokens.rollout_log_probs)
        value = value * gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=settings.is_cap)

    # The penalties, and the sum.
    kl = torch.zeros_like(log_probs)
    # What pulls the policy back to its reference.
    if settings.kl_coef:
        if tokens.reference_log_probs is None:
            raise ValueError(f"policy_loss: kl_coef = {settings.kl_coef} needs reference_log_probs")
        kl = kl_estimate(log_probs - tokens.reference_log_probs, settings.kl_estimator)
    # To be minimised: the objective counts negatively.
    terms = settings.kl_coef * kl - value
    if settings.entropy_coef:
        terms = terms - settings.entropy_coef * entropy
    # Weights carry the divisor of the global batch, so that micro-batches and ranks only add up.
    loss = (tokens.weights * terms).sum()

    # Figures, in the order of SUMS and MAXIMA.
    with torch.no_grad():
        distance = (current - tokens.rollout_log_probs).abs()
        found = (
            loss,
            objective.clipped_low,
            objective.clipped_high,
            objective.clipped_dual,
            ratio - 1 - log_ratio,
            kl,
            distance,
            ratio,
            entropy,
            # As many ones as there are live tokens.
            live[live],
        )
        maxima = (float(x.detach().max()) if len(x) else 0.0 for x in (ratio, distance))
        # In float64, as they go on adding up over micro-batches and ranks.
        sums = (float(x.detach().double().sum()) for x in found)
    return PolicyLoss(loss, *given, dict(zip(SUMS, sums, strict=True)), dict(zip(MAXIMA, maxima, strict=True)))


def _mean_of_sequences(values: Tensor, sequences: Tensor) -> Tensor:
    """The mean [R] of each element's sequence, from values [R] and sequences [R] int64."""
    _, index, count = sequences.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(count), dtype=values.dtype, device=values.device).index_add(0, index, values)
    return (sums / count)[index]


def token_cross_entropy(log_probs: Tensor, divisor: float) -> Tensor:
    """Next-token loss of supervised training from log-probabilities [R] in nats: -sum log p / divisor, a scalar.

    divisor: tokens of the global batch.
    """
    return -log_probs.sum() / divisor
