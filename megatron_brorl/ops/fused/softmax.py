"""csrc's ops on one chunk of logits [R, V_local], with types, and the merge of their statistics over ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_brorl.algo.policy_loss import POLICY_LOSSES, PolicyLossSettings, PolicyTokens
from megatron_brorl.ops.fused import native
from megatron_brorl.ops.interface import Group


@dataclass(frozen=True)
class Shard:
    """This rank's part of the vocabulary."""

    start: int  # token id of its first logit
    live: int  # number of its logits; further rows of the LM head are padding
    temperature: float
    group: Group


def gemm_(out: Tensor, a: Tensor, b: Tensor, accumulate: bool) -> None:
    """Set out [m, n] = a [m, k] @ b [k, n], or add to it; all float32 or float64, or bfloat16 with out in float32."""
    if a.dtype == torch.bfloat16 and a.device.type == "cpu" and not native.BFLOAT16_KERNEL:
        a, b = a.float(), b.float()  # slower, but not less precise
    torch.ops.brorl.gemm_(out, a, b, accumulate)


def softmax_statistics(logits: Tensor, ids: Tensor, shard: Shard) -> Tensor:
    """Return [R, 4] float64 of this shard: largest logit, sum and weighted sum of exponentials, logit of ids or 0."""
    return torch.ops.brorl.softmax_statistics(logits, ids, shard.start, shard.temperature)


def merged(statistics: Tensor, shard: Shard) -> Tensor:
    """Return the statistics [R, 4] of the whole vocabulary, the same on every rank (merge in softmax_math.h)."""
    if shard.group is None:
        return statistics
    largest = statistics[:, 0].clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=shard.group)
    own_largest, total, weighted, target = statistics.unbind(1)
    shift = torch.where(total == 0, 0.0, (own_largest - largest) / shard.temperature)
    factor = shift.exp()
    sums = torch.stack((factor * total, factor * (weighted + shift * total), target), dim=1)
    dist.all_reduce(sums, group=shard.group)
    return torch.cat((largest.unsqueeze(1), sums), dim=1)


def softmax_gradient_(
    logits: Tensor,
    ids: Tensor,
    statistics: Tensor,
    log_prob_gradient: Tensor,
    entropy_gradient: Tensor | None,
    shard: Shard,
    to_bfloat16: bool,
) -> None:
    """Overwrite the logits by their gradient, given gradients [R] of log-probability and entropy.

    statistics: merged over ranks. to_bfloat16: write bfloat16, in the first half of each row.
    """
    torch.ops.brorl.softmax_gradient_(
        logits, ids, statistics, log_prob_gradient, entropy_gradient, shard.start, shard.temperature, to_bfloat16
    )


def ppo_tokens(
    log_probs: Tensor, entropy: Tensor, tokens: PolicyTokens, settings: PolicyLossSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients [R] of the policy loss in log-probability and entropy, and the columns [R, 8].

    The columns are algo.policy_loss.SUMS before "entropy".
    """
    return torch.ops.brorl.ppo_tokens(
        log_probs,
        entropy,
        tokens.old_log_probs,
        tokens.rollout_log_probs,
        tokens.reference_log_probs,
        tokens.advantages,
        tokens.weights,
        settings.policy_loss,
        POLICY_LOSSES[settings.policy_loss].constants(settings),
        settings.is_cap,
        settings.kl_coef,
        settings.kl_estimator,
        settings.entropy_coef,
    )
