"""The policy loss, per token. Pure functions on tensors of R response tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) is far outside any clip range and far inside float32

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

KlEstimator = Literal["k1", "k2", "k3"]
Aggregation = Literal["token_mean", "sequence_mean", "fixed"]


@dataclass(frozen=True)
class PolicyLossSettings:
    """What does not change from token to token."""

    eps_low: float = 0.2
    eps_high: float = 0.28
    dual_clip: float = 0.0  # bound c > 1 on the ratio where the advantage is negative; 0 = none
    is_cap: float = 0.0  # largest importance weight against the rollout policy; 0 = every weight is 1
    kl_coef: float = 0.0  # of the KL to the reference policy in the loss; 0 = no reference
    kl_estimator: KlEstimator = "k2"
    entropy_coef: float = 0.0
    ratio: Literal["token", "sequence"] = "token"


@dataclass(frozen=True)
class PolicyTokens:
    """What the loss knows of each of R response tokens, beside the policy; log-probabilities in nats."""

    rollout_log_probs: Tensor  # [R] when sampled
    advantages: Tensor  # [R]
    weights: Tensor  # [R] of the token in the loss, from token_weights; 0 masks it, whatever its other entries hold
    old_log_probs: Tensor | None = None  # [R]; None: the actor is still its own old policy
    reference_log_probs: Tensor | None = None  # [R]; needed where kl_coef is not 0
    sequences: Tensor | None = None  # [R] int64, which sequence of the batch; needed where ratio is "sequence"

    def where(self, live: Tensor | slice) -> PolicyTokens:
        """The tokens that `live` selects: a mask [R] or a slice."""
        selected: dict[str, Any] = {k: None if v is None else v[live] for k, v in vars(self).items()}
        return PolicyTokens(**selected)


@dataclass(frozen=True)
class PolicyLoss:
    """The loss and what people watch beside it."""

    loss: Tensor  # scalar, differentiable
    sums: dict[str, float]  # keys SUMS; over live tokens, so that they add up over micro-batches and ranks
    maxima: dict[str, float]  # keys MAXIMA; 0 without tokens


def policy_loss(log_probs: Tensor, entropy: Tensor, tokens: PolicyTokens, settings: PolicyLossSettings) -> PolicyLoss:
    """Clipped policy loss from log-probabilities and entropies [R], both in nats.

    loss = sum_t weight_t (-u_t clipped(r_t, A_t) + kl_coef KL_t - entropy_coef H_t), where
    clipped = min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) (BroRL, section 3.1; DAPO, eq. 8), bounded from below by
    dual_clip A where A < 0 (Ye et al. 2020, eq. 5); u_t = min(pi_old / pi_rollout, is_cap) without gradient (Yao et al.
    2025); KL_t by kl_estimate. r_t = pi(t) / pi_old(t), or with ratio = "sequence" the geometric mean of these over
    the sequence (GSPO, Zheng et al. 2025, eq. 7). Without old_log_probs r_t = 1 with the gradient of pi.

    The entropy bonus has a gradient only if `entropy` has one. clipped_* count the tokens whose gradient each bound
    removed; approx_kl is the k3 estimate of KL(pi_old || pi), reference_kl the chosen one of KL(pi || pi_ref);
    rollout_gap is |log pi - log pi_rollout|.
    """
    live = tokens.weights != 0
    log_probs, entropy, tokens = log_probs[live], entropy[live], tokens.where(live)
    current, advantages = log_probs.detach(), tokens.advantages
    old = current if tokens.old_log_probs is None else tokens.old_log_probs
    log_ratio = log_probs - old
    if settings.ratio == "sequence":
        if tokens.sequences is None:
            raise ValueError('policy_loss: ratio = "sequence" needs tokens.sequences')
        log_ratio = _mean_of_sequences(log_ratio, tokens.sequences)
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - settings.eps_low, 1 + settings.eps_high) * advantages)
    dual = torch.zeros_like(ratio, dtype=torch.bool)
    if settings.dual_clip:
        dual = (advantages < 0) & (ratio > settings.dual_clip)
        objective = torch.where(dual, settings.dual_clip * advantages, objective)
    if settings.is_cap:
        gap = torch.where(old == tokens.rollout_log_probs, 0.0, old - tokens.rollout_log_probs)
        objective = objective * gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=settings.is_cap)
    kl = torch.zeros_like(log_probs)
    if settings.kl_coef:
        if tokens.reference_log_probs is None:
            raise ValueError(f"policy_loss: kl_coef = {settings.kl_coef} needs reference_log_probs")
        kl = kl_estimate(log_probs - tokens.reference_log_probs, settings.kl_estimator)
    terms = settings.kl_coef * kl - objective
    if settings.entropy_coef:
        terms = terms - settings.entropy_coef * entropy
    loss = (tokens.weights * terms).sum()
    with torch.no_grad():
        distance = (current - tokens.rollout_log_probs).abs()
        found = (
            loss,
            (ratio < 1 - settings.eps_low) & (advantages < 0),
            (ratio > 1 + settings.eps_high) & (advantages > 0),
            dual,
            ratio - 1 - log_ratio,
            kl,
            distance,
            ratio,
            entropy,
            live[live],
        )
        maxima = (float(x.detach().max()) if len(x) else 0.0 for x in (ratio, distance))
        sums = (float(x.detach().double().sum()) for x in found)
    return PolicyLoss(loss, dict(zip(SUMS, sums, strict=True)), dict(zip(MAXIMA, maxima, strict=True)))


def kl_estimate(log_ratio: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimates [R] of KL(pi || pi_ref) from log pi - log pi_ref [R] of tokens drawn from pi (Schulman 2020).

    k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, with d within +-MAX_LOG_RATIO. As a loss, the mean gradient of k1 is
    zero, that of k2 is the gradient of the KL, that of k3 the gradient of the reverse KL(pi_ref || pi).
    """
    d = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return d
    return d.square() / 2 if estimator == "k2" else (-d).exp() - 1 + d


def _mean_of_sequences(values: Tensor, sequences: Tensor) -> Tensor:
    """The mean of each element's sequence [R]; sequences [R] int64."""
    _, index, count = sequences.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(count), dtype=values.dtype, device=values.device).index_add(0, index, values)
    return (sums / count)[index]


def token_weights(
    lengths: Sequence[int], aggregation: Aggregation, tokens: float, sequences: float, fixed: float = 0.0
) -> list[float]:
    """The weight of every token of each sequence in the loss of the global batch.

    lengths: live tokens of this rank's sequences; tokens, sequences: of the global batch. token_mean: mean over tokens
    (DAPO, section 3.3). sequence_mean: mean over sequences of their token means (GRPO). fixed: sum over tokens divided
    by `fixed` tokens per sequence, so that no sequence's length changes another's weight (Dr. GRPO, Liu et al. 2025).
    """
    if aggregation == "token_mean":
        return [1 / tokens if tokens else 0.0] * len(lengths)
    if aggregation == "sequence_mean":
        return [1 / (n * sequences) if n else 0.0 for n in lengths]
    return [1 / (fixed * sequences)] * len(lengths)


def token_cross_entropy(log_probs: Tensor, divisor: float) -> Tensor:
    """Next-token loss of supervised training: -sum log p / divisor, divisor = tokens of the global batch."""
    return -log_probs.sum() / divisor
