"""What the fused ops compute, in plain torch: any device, any floating dtype, gradients by autograd.

This file is the definition that csrc/ must agree with, in value and gradient; it holds the full [R, V] logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

from megatron_brorl.algo.advantage import Moments, group_baseline, group_normalised, moments
from megatron_brorl.algo.loss import PolicyLossSettings, PolicyTokens, policy_loss


@dataclass(frozen=True)
class LinearPpoLoss:
    """The loss from hidden states on, and what people watch beside it."""

    loss: Tensor  # scalar, the only differentiable field
    log_probs: Tensor  # [R] of the given ids, nats
    entropy: Tensor  # [R] of the softmax, nats
    sums: dict[str, float]  # keys algo.loss.SUMS; over tokens, so that they add up over micro-batches and ranks
    maxima: dict[str, float]  # keys algo.loss.MAXIMA; 0 without tokens


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of everything that is not a matrix: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def linear_log_probs(hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of softmax(hidden @ weight.T / temperature) at each row.

    hidden [R, H]; weight [V, H], every row of which is in the vocabulary; ids [R] int64 below V. Returns two [R]
    tensors in the compute dtype, in nats, both differentiable.
    """
    compute = compute_dtype(hidden.dtype)
    all_log_probs = (hidden.to(compute) @ weight.to(compute).t() / temperature).log_softmax(dim=-1)
    entropy = -(all_log_probs.exp() * all_log_probs).sum(dim=-1)
    return all_log_probs.gather(-1, ids.unsqueeze(-1)).squeeze(-1), entropy


def linear_ppo_loss(
    hidden: Tensor, weight: Tensor, ids: Tensor, tokens: PolicyTokens, settings: PolicyLossSettings, temperature: float
) -> LinearPpoLoss:
    """The policy loss of algo.loss.policy_loss, where formula and figures are explained, from the hidden states on.

    hidden [R, H], weight [V, H], ids [R] as in linear_log_probs; the tensors of tokens are [R] in the compute dtype.
    """
    live = tokens.weights != 0  # selected before the softmax, whose gradient would be nan where a masked logit is
    found = linear_log_probs(hidden[live], weight, ids[live], temperature)
    result = policy_loss(*found, tokens.where(live), settings)
    with torch.no_grad():
        log_probs, entropy = linear_log_probs(hidden, weight, ids, temperature)
    return LinearPpoLoss(result.loss, log_probs, entropy, result.sums, result.maxima)


@dataclass(frozen=True)
class ValueLoss:
    """The critic's loss, and what people watch beside it; all of it adds up or merges over micro-batches and ranks."""

    loss: Tensor  # scalar, differentiable in values
    sums: dict[str, float]  # loss, clipped (tokens whose gradient the clipping removed), tokens (unmasked)
    returns: Moments  # over unmasked tokens
    residuals: Moments  # of returns - values; both go into algo.advantage.explained_variance


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, clip: float) -> ValueLoss:
    """loss = sum_t w_t max((v_t - R_t)^2, (clip(v_t, old_t - clip, old_t + clip) - R_t)^2) / 2; all tensors are [R].

    The value loss of PPO (Schulman et al. 2017) as in OpenAI baselines, ppo2. weights carry the mask and the divisor:
    a token of weight 0 contributes nothing to anything, whatever its other entries hold. clip in units of value,
    infinity: unclipped, and old_values are not looked at.
    """
    kept = weights != 0  # selected, because 0 * nan is nan, forward and backward
    v, old, target, w = values[kept], old_values[kept], returns[kept], weights[kept]
    plain = (v - target).square()
    clipped = plain if math.isinf(clip) else (v.clamp(old - clip, old + clip) - target).square()
    loss = (w * torch.maximum(plain, clipped)).sum() / 2
    sums = {"loss": float(loss.detach()), "clipped": float((clipped > plain).sum()), "tokens": float(len(v))}
    residual = target.double() - v.detach().double()
    return ValueLoss(loss, sums, moments(target), moments(residual))


GroupKind = Literal["mean", "mean_std"]


def check_kind(kind: str) -> None:
    if kind not in get_args(GroupKind):
        raise ValueError(f"group_advantages: kind is {kind!r}; it takes {' or '.join(map(repr, get_args(GroupKind)))}")


def gae(
    rewards: Tensor,
    values: Tensor,
    starts: Tensor,
    mask: Tensor | None = None,
    bootstrap: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Generalised advantages and the returns to regress values on, both [T] (Schulman et al. 2016, eq. 11-16).

    rewards and values [T] of packed segments: segment s is starts[s]:starts[s + 1] (starts [S + 1] int64, from 0 to T,
    never falling; a segment may be empty). Per segment, from its last token on: delta_t = r_t + gamma V_{t+1} - V_t,
    A_t = delta_t + gamma lam A_{t+1}, return_t = A_t + V_t; after the last token V is bootstrap [S] (the value of the
    state in which a rollout was cut off; 0 without one) and A is 0. Where mask [T] is false (tool output), the
    recursion jumps over the token, reward and all; its advantage and return are 0. gamma and lam lie in [0, 1].
    """
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    kept = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask
    bounds = starts.tolist()
    for s, (begin, end) in enumerate(pairwise(bounds)):
        advantage = torch.zeros((), dtype=torch.float64, device=rewards.device)
        next_value = advantage if bootstrap is None else bootstrap[s].double()
        for t in reversed(range(begin, end)):
            if kept[t]:
                value = values[t].double()
                advantage = rewards[t].double() + gamma * next_value - value + gamma * lam * advantage
                next_value = value
                advantages[t], returns[t] = advantage, advantage + value
    return advantages, returns


def group_advantages(rewards: Tensor, starts: Tensor, mask: Tensor | None = None, kind: GroupKind = "mean") -> Tensor:
    """Advantages [B] of rollouts against their group: starts[g]:starts[g + 1] of rewards [B] (starts as in gae).

    "mean": algo.advantage.group_baseline, the first step of REINFORCE++-baseline; "mean_std": group_normalised there,
    as in GRPO. Where mask [B] is false (a lost rollout) the advantage is 0 and the rest of the group does not see it.
    Exactly 0 in groups of one and where all rewards are equal.
    """
    check_kind(kind)
    formula = group_baseline if kind == "mean" else group_normalised
    kept = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask
    result = torch.zeros_like(rewards)
    bounds = starts.tolist()
    for begin, end in pairwise(bounds):
        members = torch.arange(begin, end, device=rewards.device)[kept[begin:end]]
        if len(members) > 1:
            result[members] = formula(rewards[members])
    return result
