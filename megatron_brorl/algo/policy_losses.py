"""The policy losses that config key algo.policy_loss chooses from, each one function of ratio and advantage.

A variant is one entry here and one of the same name in csrc/policy/ppo_loss_math.h, where dual numbers give the
derivative; what all variants share (importance weight, KL, entropy, aggregation) is in algo.loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_brorl.algo.kl import KlEstimator


@dataclass(frozen=True)
class PolicyLossSettings:
    """What does not change from token to token; fields of the same names as the keys of [algo]."""

    eps_low: float = 0.2
    eps_high: float = 0.28
    dual_clip: float = 0.0  # bound c > 1 on the ratio where the advantage is negative; 0 = none
    is_cap: float = 0.0  # largest importance weight against the rollout policy; 0 = every weight is 1
    kl_coef: float = 0.0  # of the KL to the reference policy in the loss; 0 = no reference
    kl_estimator: KlEstimator = "k2"
    entropy_coef: float = 0.0
    ratio: Literal["token", "sequence"] = "token"
    policy_loss: str = "clip"  # a name in POLICY_LOSSES


@dataclass(frozen=True)
class Objective:
    """What a policy loss makes of R tokens."""

    value: Tensor  # [R], to be maximised, differentiable in the ratio
    clipped_low: Tensor  # [R] bool: tokens that the lower bound changes
    clipped_high: Tensor  # [R] bool: those that the upper bound changes
    clipped_dual: Tensor  # [R] bool: those that the bound for negative advantages changes


# (ratio [R] = pi / pi_old, advantages [R], settings) -> the objective of each token
Formula = Callable[[Tensor, Tensor, PolicyLossSettings], Objective]


@dataclass(frozen=True)
class PolicyLossEntry:
    formula: Formula
    constants: Callable[[PolicyLossSettings], tuple[float, ...]]  # what csrc's entry takes, in its order


POLICY_LOSSES: dict[str, PolicyLossEntry] = {}


def policy_loss_entry(name: str) -> PolicyLossEntry:
    """Raises ValueError for a name that no policy loss has."""
    if name not in POLICY_LOSSES:
        raise ValueError(f"policy_loss is {name!r}; it takes {', '.join(map(repr, POLICY_LOSSES))}")
    return POLICY_LOSSES[name]


def _register(name: str, constants: Callable[[PolicyLossSettings], tuple[float, ...]]) -> Callable[[Formula], Formula]:
    def add(formula: Formula) -> Formula:
        POLICY_LOSSES[name] = PolicyLossEntry(formula, constants)
        return formula

    return add


@_register("clip", lambda s: (1 - s.eps_low, 1 + s.eps_high, s.dual_clip))
def clip(ratio: Tensor, advantages: Tensor, settings: PolicyLossSettings) -> Objective:
    """min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) (BroRL, section 3.1; DAPO, eq. 8), all [R].

    Where A < 0 bounded from below by dual_clip A (Ye et al. 2020, eq. 5). A bound that is active takes the token's
    gradient away.
    """
    low, high = 1 - settings.eps_low, 1 + settings.eps_high
    value = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    dual = torch.zeros_like(ratio, dtype=torch.bool)
    if settings.dual_clip:
        dual = (advantages < 0) & (ratio > settings.dual_clip)
        value = torch.where(dual, settings.dual_clip * advantages, value)
    return Objective(value, (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0), dual)


@_register("cispo", lambda s: (1 - s.eps_low, 1 + s.eps_high))
def cispo(ratio: Tensor, advantages: Tensor, settings: PolicyLossSettings) -> Objective:
    """sg(clip(r, 1 - eps_low, 1 + eps_high)) A log r, all [R] (MiniMax-M1, Chen et al. 2025, eq. 4 and 5).

    The importance weight is clipped and has no gradient, so that every token keeps one. log r is the paper's log pi but
    for log pi_old, which does not move.
    """
    low, high = 1 - settings.eps_low, 1 + settings.eps_high
    value = ratio.detach().clamp(low, high) * advantages * ratio.log()
    return Objective(value, ratio < low, ratio > high, torch.zeros_like(ratio, dtype=torch.bool))


TAU_POSITIVE, TAU_NEGATIVE = 1.0, 1.05  # temperatures of "sapo", those of the paper


@_register("sapo", lambda _: (TAU_POSITIVE, TAU_NEGATIVE))
def sapo(ratio: Tensor, advantages: Tensor, settings: PolicyLossSettings) -> Objective:
    """Return 4 / tau sigmoid(tau (r - 1)) A, all [R] (SAPO, Gao et al. 2025).

    tau is TAU_POSITIVE where A > 0, else TAU_NEGATIVE. The slope in r is 1 at r = 1 and decreases on both sides.
    """
    positive, negative = ratio.new_tensor(TAU_POSITIVE), ratio.new_tensor(TAU_NEGATIVE)
    tau = torch.where(advantages > 0, positive, negative)
    none = torch.zeros_like(ratio, dtype=torch.bool)
    return Objective((tau * (ratio - 1)).sigmoid() * (4 / tau) * advantages, none, none, none)
