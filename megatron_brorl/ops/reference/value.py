"""The loss of the critic in plain torch: the definition that csrc/policy/value_loss* must agree with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_brorl.algo.advantages import Moments, moments


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
