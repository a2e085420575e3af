"""What the fused ops compute, in plain torch: any device, any floating dtype, gradients by autograd.

This file is the definition that csrc/ must agree with, in value and gradient; it holds the full [R, V] logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
    log_probs, entropy = linear_log_probs(hidden, weight, ids, temperature)
    result = policy_loss(log_probs, entropy, tokens, settings)
    return LinearPpoLoss(result.loss, log_probs.detach(), entropy.detach(), result.sums, result.maxima)
