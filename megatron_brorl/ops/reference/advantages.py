"""Advantages and the value loss in plain torch, which define the results of csrc/policy/advantages* and value_loss*."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from megatron_brorl.algo.advantages import moments
from megatron_brorl.ops.interface import ValueLoss


def gae(rewards: Tensor, values: Tensor, starts: Tensor, gamma: float = 1.0, lam: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return generalised advantages and the targets of the values, both [T] (Schulman et al. 2016, eq. 11-16).

    rewards and values [T] of packed segments: segment s is starts[s]:starts[s + 1] (starts [S + 1] int64, from 0 to T,
    never falling; a segment may be empty). Per segment, from its last token on: delta_t = r_t + gamma V_{t+1} - V_t,
    A_t = delta_t + gamma lam A_{t+1}, return_t = A_t + V_t; after the last token V and A are 0. 0 <= gamma, lam <= 1.
    """
    # The loop runs on the CPU, because a GPU would launch several kernels per token. All sums are in float64, because a
    # return is a sum over thousands of tokens.
    device = rewards.device
    rewards, values = rewards.cpu(), values.cpu()
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for begin, end in pairwise(starts.tolist()):
        advantage = next_value = torch.zeros((), dtype=torch.float64)
        for t in reversed(range(begin, end)):
            value = values[t].double()
            advantage = rewards[t].double() + gamma * next_value - value + gamma * lam * advantage
            next_value = value
            advantages[t], returns[t] = advantage, advantage + value
    return advantages.to(device), returns.to(device)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, clip: float) -> ValueLoss:
    """Return the loss sum_t w_t max((v_t - R_t)^2, (clip(v_t, old_t - clip, old_t + clip) - R_t)^2) / 2.

    The value loss of PPO (Schulman et al. 2017) as in OpenAI baselines, ppo2. weights carry the mask and the divisor:
    a token of weight 0 contributes nothing, even if its other entries are NaN. clip is in units of value; with infinity
    the loss is not clipped and old_values are not read.
    """
    unmasked = weights != 0  # selected, because 0 * nan is nan, forward and backward
    v = values[unmasked]
    old = old_values[unmasked]
    target = returns[unmasked]
    w = weights[unmasked]
    plain = (v - target).square()
    clipped = plain if math.isinf(clip) else (v.clamp(old - clip, old + clip) - target).square()
    loss = (w * torch.maximum(plain, clipped)).sum() / 2
    sums = {"loss": float(loss.detach()), "clipped": float((clipped > plain).sum()), "tokens": float(len(v))}
    residual = target.double() - v.detach().double()
    return ValueLoss(loss, sums, moments(target), moments(residual))
