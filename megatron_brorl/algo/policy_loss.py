"""Losses of the actor, as pure functions of tensors of R response tokens.

A new policy loss is one function of ratio and advantage with an entry in POLICY_LOSSES, a name in config.schema, and
a function with an entry in BRORL_POLICY_LOSSES of csrc/policy/ppo_loss_math.h, where dual numbers give the derivative.
A user's loss is a function of log-probabilities, without a counterpart in csrc. `policy_loss` adds the terms that all
of them share: importance weight, KL and entropy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_brorl.algo import functions
from megatron_brorl.user_functions import is_function

MAX_LOG_RATIO = 20.0  # exp(20) is far outside of any clip range and far from overflow in float32

KlEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(log_ratio: Tensor, estimator: KlEstimator) -> Tensor:
    """Return estimates [R] of KL(pi || pi_ref) from log pi - log pi_ref [R] of tokens drawn from pi (Schulman 2020).

    k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, with d within +-MAX_LOG_RATIO. As a loss, the mean gradient of k1 is
    zero, that of k2 is the gradient of the KL, that of k3 the gradient of the reverse KL(pi_ref || pi).
    """
    d = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return d
    return d.square() / 2 if estimator == "k2" else (-d).exp() - 1 + d


@dataclass(frozen=True)
class PolicyLossSettings:
    """Settings of the loss; every field is the key of [algo] with the same name."""

    eps_low: float = 0.2
    eps_high: float = 0.28
    dual_clip: float = 0.0  # bound c > 1 on the ratio of tokens with a negative advantage; 0 = none
    is_cap: float = 0.0  # largest importance weight against the rollout policy; 0 = every weight is 1
    kl_coef: float = 0.0  # of the KL to the reference policy in the loss; 0 = no reference
    kl_estimator: KlEstimator = "k2"
    entropy_coef: float = 0.0
    ratio: Literal["token", "sequence"] = "token"
    policy_loss: str = "clip"  # a name in POLICY_LOSSES, or a function of the user

    @property
    def of_sequences(self) -> bool:
        """Return whether the loss of a token may depend on other tokens. It then needs PolicyTokens.sequences."""
        return self.ratio == "sequence" or is_function(self.policy_loss)


@dataclass(frozen=True)
class Objective:
    """The objective of R tokens before weights and penalties."""

    value: Tensor  # [R], to be maximised, differentiable in the ratio
    clipped_low: Tensor  # [R] bool: tokens that the lower bound changes
    clipped_high: Tensor  # [R] bool: tokens that the upper bound changes
    clipped_dual: Tensor  # [R] bool: tokens that the bound for negative advantages changes


def clip(ratio: Tensor, advantages: Tensor, settings: PolicyLossSettings) -> Objective:
    """Return min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), all [R] (BroRL, section 3.1; DAPO, eq. 8).

    dual_clip A is a lower bound for tokens with A < 0 (Ye et al. 2020, eq. 5). An active bound removes the gradient.
    """
    low, high = 1 - settings.eps_low, 1 + settings.eps_high
    value = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    dual = torch.zeros_like(ratio, dtype=torch.bool)
    if settings.dual_clip:
        dual = (advantages < 0) & (ratio > settings.dual_clip)
        value = torch.where(dual, settings.dual_clip * advantages, value)
    return Objective(value, (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0), dual)


def cispo(ratio: Tensor, advantages: Tensor, settings: PolicyLossSettings) -> Objective:
    """Return sg(clip(r, 1 - eps_low, 1 + eps_high)) A log r, all [R] (MiniMax-M1, Chen et al. 2025, eq. 4 and 5).

    Only the importance weight is clipped, and it has no gradient, so every token keeps its gradient. log r differs from
    the paper's log pi by a constant.
    """
    low, high = 1 - settings.eps_low, 1 + settings.eps_high
    value = ratio.detach().clamp(low, high) * advantages * ratio.log()
    used = advantages != 0  # A bound changes nothing where the objective is 0.
    return Objective(value, used & (ratio < low), used & (ratio > high), torch.zeros_like(used))


TAU_POSITIVE = 1.0  # SAPO's temperatures, those of the paper
TAU_NEGATIVE = 1.05


def sapo(ratio: Tensor, advantages: Tensor, settings: PolicyLossSettings) -> Objective:
    """Return 4 / tau sigmoid(tau (r - 1)) A, all [R] (SAPO, Gao et al. 2025).

    tau is TAU_POSITIVE where A > 0, else TAU_NEGATIVE. The slope in r is 1 at r = 1 and decreases on both sides.
    """
    tau = torch.where(advantages > 0, ratio.new_tensor(TAU_POSITIVE), ratio.new_tensor(TAU_NEGATIVE))
    unclipped = torch.zeros_like(ratio, dtype=torch.bool)
    return Objective((tau * (ratio - 1)).sigmoid() * (4 / tau) * advantages, unclipped, unclipped, unclipped)


@dataclass(frozen=True)
class PolicyLossEntry:
    """One value of the config key algo.policy_loss."""

    # (ratio [R] = pi / pi_old, advantages [R], settings) -> the objective of each token
    formula: Callable[[Tensor, Tensor, PolicyLossSettings], Objective]
    # settings -> the constants of the function in csrc, in the order in which it reads them
    constants: Callable[[PolicyLossSettings], tuple[float, ...]]


POLICY_LOSSES = {
    "clip": PolicyLossEntry(clip, lambda s: (1 - s.eps_low, 1 + s.eps_high, s.dual_clip)),
    "cispo": PolicyLossEntry(cispo, lambda s: (1 - s.eps_low, 1 + s.eps_high)),
    "sapo": PolicyLossEntry(sapo, lambda _: (TAU_POSITIVE, TAU_NEGATIVE)),
}

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
    """Inputs of the loss for R response tokens; log-probabilities in nats."""

    rollout_log_probs: Tensor  # [R], from the rollout engine
    advantages: Tensor  # [R]
    weights: Tensor  # [R], see token_weights; a token of weight 0 is masked, and its other values may be NaN
    old_log_probs: Tensor | None = None  # [R]; None: the actor has the weights of pi_old, so the ratio is 1
    reference_log_probs: Tensor | None = None  # [R]; required if kl_coef is not 0
    sequences: Tensor | None = None  # [R] int64, the index of the sequence; required if settings.of_sequences

    def where(self, index: Tensor | slice) -> PolicyTokens:
        """Return the tokens selected by a mask [R] bool, by indices int64 or by a slice."""
        selected: dict[str, Any] = {k: None if v is None else v[index] for k, v in vars(self).items()}
        return PolicyTokens(**selected)


@dataclass(frozen=True)
class PolicyLoss:
    """The loss and its metrics."""

    loss: Tensor  # scalar, the only differentiable field
    log_probs: Tensor  # [R], nats
    entropy: Tensor  # [R], nats
    metrics: Tensor  # [SUMS and MAXIMA] float64, on the device, so that only a reader of sums or maxima waits for it

    @property
    def sums(self) -> dict[str, float]:
        """Sums over the tokens that are not masked, by SUMS. They add up over micro-batches and ranks."""
        return dict(zip(SUMS, self.metrics[: len(SUMS)].tolist(), strict=True))

    @property
    def maxima(self) -> dict[str, float]:
        """Maxima over the tokens that are not masked, by MAXIMA; 0 without tokens."""
        return dict(zip(MAXIMA, self.metrics[len(SUMS) :].tolist(), strict=True))


def policy_loss(log_probs: Tensor, entropy: Tensor, tokens: PolicyTokens, settings: PolicyLossSettings) -> PolicyLoss:
    """Return the policy loss from log-probabilities and entropies [R], both in nats.

    loss = sum_t weight_t (-u_t f(r_t, A_t) + kl_coef KL_t - entropy_coef H_t).
    f: the entry of settings.policy_loss in POLICY_LOSSES, or minus the result of the user's function.
    u_t = min(pi_old / pi_rollout, is_cap), without gradient (Yao et al. 2025). KL_t: by kl_estimate.
    r_t = pi(t) / pi_old(t). With ratio = "sequence" it is the geometric mean of these over the sequence (GSPO, Zheng et
    al. 2025, eq. 7). Without old_log_probs, r_t = 1 with the gradient of pi.

    The entropy bonus has a gradient only if `entropy` has one. clipped_*: tokens that each bound of f changes.
    approx_kl: k3 estimate of KL(pi_old || pi). reference_kl: the chosen estimate of KL(pi || pi_ref). rollout_gap:
    |log pi - log pi_rollout|. Raises ValueError if a setting needs a field that tokens lack, and UserError if the
    user's function fails.
    """
    detached = log_probs.detach(), entropy.detach()
    live = tokens.weights != 0
    custom = _user_objective(log_probs, entropy, tokens, live, settings) if is_function(settings.policy_loss) else None

    # Masked tokens are removed, not multiplied by 0, because their values may be NaN.
    log_probs = log_probs[live]
    entropy = entropy[live]
    tokens = tokens.where(live)
    current = log_probs.detach()

    # Without an old policy the log-ratio is 0 and still has the gradient of log pi.
    old = current if tokens.old_log_probs is None else tokens.old_log_probs
    log_ratio = log_probs - old
    if settings.ratio == "sequence":
        # Replace each token's log-ratio by the mean over its sequence.
        _, index, count = _sequences(tokens).unique(return_inverse=True, return_counts=True)
        sums = torch.zeros(len(count), dtype=log_ratio.dtype, device=log_ratio.device).index_add(0, index, log_ratio)
        log_ratio = (sums / count)[index]
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()

    # The importance weight corrects for the difference between engine and trainer. Neither policy is trained here.
    objective = custom or POLICY_LOSSES[settings.policy_loss].formula(ratio, tokens.advantages, settings)
    value = objective.value
    if settings.is_cap:
        # The difference of two infinities would be NaN.
        gap = torch.where(old == tokens.rollout_log_probs, 0.0, old - tokens.rollout_log_probs)
        value = value * gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=settings.is_cap)

    kl = torch.zeros_like(log_probs)
    if settings.kl_coef:
        if tokens.reference_log_probs is None:
            raise ValueError(f"policy_loss: kl_coef = {settings.kl_coef} needs reference_log_probs")
        kl = kl_estimate(log_probs - tokens.reference_log_probs, settings.kl_estimator)
    terms = settings.kl_coef * kl - value
    if settings.entropy_coef:
        terms = terms - settings.entropy_coef * entropy
    # The weights contain the divisor of the global batch, so that the losses of micro-batches and ranks add up.
    loss = (tokens.weights * terms).sum()

    # The metrics, in the order of SUMS and MAXIMA.
    with torch.no_grad():
        distance = (current - tokens.rollout_log_probs).abs()
        per_token = (
            loss,
            objective.clipped_low,
            objective.clipped_high,
            objective.clipped_dual,
            ratio - 1 - log_ratio,
            kl,
            distance,
            ratio,
            entropy,
            live[live],  # true for each token, so that the sum is their number
        )
        totals = [x.detach().double().sum() for x in per_token]
        maxima = [x.detach().double().max() if len(x) else totals[0].new_zeros(()) for x in (ratio, distance)]
    return PolicyLoss(loss, *detached, torch.stack(totals + maxima))


def _user_objective(
    log_probs: Tensor, entropy: Tensor, tokens: PolicyTokens, live: Tensor, settings: PolicyLossSettings
) -> Objective:
    """Return minus the loss that a function of the user gives to each live token. Raises UserError if it fails."""
    unclipped = torch.zeros_like(live[live])  # false for each live token
    if not len(unclipped):
        return Objective(log_probs[live], unclipped, unclipped, unclipped)
    inputs = {
        "log_probs": log_probs,
        "old_log_probs": log_probs.detach() if tokens.old_log_probs is None else tokens.old_log_probs,
        "advantages": tokens.advantages,
        "entropy": entropy,
    }
    function = functions.find("algo.policy_loss", settings.policy_loss)
    sequence = _sequences(tokens).unique(return_inverse=True)[1]
    loss = function(log_probs.shape, "a loss per token", **inputs, mask=live, sequence=sequence)
    if log_probs.requires_grad and not loss.requires_grad:
        function.refuse("returned a loss without gradient: compute it from log_probs or entropy, without detach()")
    if invalid := (live & ~loss.isfinite() & log_probs.isfinite()).nonzero().flatten().tolist():
        token = invalid[0]
        values = ", ".join(f"{name} {float(x[token]):g}" for name, x in inputs.items())
        function.refuse(f"returned {float(loss[token]):g} for a token with {values}")
    return Objective(-loss[live].to(log_probs.dtype), unclipped, unclipped, unclipped)


def _sequences(tokens: PolicyTokens) -> Tensor:
    if tokens.sequences is None:
        raise ValueError("policy_loss: this loss needs tokens.sequences")
    return tokens.sequences


def mismatch_mask(old: Tensor, rollout: Tensor, by: Literal["token", "sequence"], low: float, high: float) -> Tensor:
    """Return where low <= pi_old / pi_rollout <= high, bool [G], from log-probabilities [G] of one response in nats.

    by: the ratio of each token (IcePop, Ling team 2025), or the geometric mean over the sequence for all of its tokens.
    """
    gap = (old - rollout).double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if by == "sequence":
        gap = gap.mean().expand(len(gap))
    ratio = gap.exp()
    return torch.logical_and(ratio >= low, ratio <= high)


def token_weights(
    lengths: Sequence[int],
    aggregation: Literal["token_mean", "sequence_mean", "fixed"],
    tokens: float,
    sequences: float,
    fixed: float = 0.0,
) -> list[float]:
    """Return the weight of a token in the loss of the global batch, one per sequence.

    lengths: tokens of each of this rank's sequences. tokens, sequences: their numbers in the global batch. token_mean:
    mean over tokens (DAPO, section 3.3). sequence_mean: mean over sequences of their token means (GRPO). fixed: sum
    over tokens divided by `fixed` tokens per sequence, so that no sequence's length changes the weight of another one
    (Dr. GRPO, Liu et al. 2025).
    """
    if aggregation == "token_mean":
        return [1 / tokens if tokens else 0.0] * len(lengths)
    if aggregation == "sequence_mean":
        return [1 / (n * sequences) if n else 0.0 for n in lengths]
    return [1 / (fixed * sequences)] * len(lengths)
