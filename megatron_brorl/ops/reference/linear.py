"""Log-probabilities and the policy loss from hidden states in plain torch, which define the results of csrc/.

Under tensor parallelism rank t of the group holds rows [t * V/tp, (t+1) * V/tp) of the LM head. The softmax is merged
over ranks by maxima and sums (as in Megatron's vocab-parallel cross entropy; Shoeybi et al. 2019, section 3). Logits
are computed in chunks of rows, and again in the backward pass, so that [R, V] is never held.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_brorl.algo.policy_loss import PolicyLoss, PolicyLossSettings, PolicyTokens, policy_loss
from megatron_brorl.ops.interface import Group, compute_dtype

CHUNK_BYTES = 64 << 20  # of logits held at a time


def linear_log_probs(
    hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float, group: Group = None, vocab: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return log-probability of ids and entropy of softmax(hidden @ weight.T / temperature) at each row.

    hidden [R, H]; weight [V, H], whose rows from `vocab` on (None: no rows) are padding without probability; ids [R]
    int64 below `vocab`. With a group, hidden and ids are the same on all its ranks, weight is this rank's shard
    [V/tp, H], and the gradient of hidden is summed over the group. The results [R] are in the compute dtype, in nats.
    """
    ranks = 1 if group is None else dist.get_world_size(group)
    vocab = len(weight) * ranks if vocab is None else vocab
    shared = group if ranks > 1 else None
    return _LinearLogProbs.apply(hidden, weight, ids, vocab, temperature, shared)


def linear_ppo_loss(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    tokens: PolicyTokens,
    settings: PolicyLossSettings,
    temperature: float,
    group: Group = None,
    vocab: int | None = None,
) -> PolicyLoss:
    """Return the policy loss of algo.policy_loss, which documents formula and metrics, from hidden states.

    hidden, weight, ids, group and vocab as in linear_log_probs; the tensors of tokens are [R] in the compute dtype.
    """
    return policy_loss(*linear_log_probs(hidden, weight, ids, temperature, group, vocab), tokens, settings)


def linear_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return hidden [K, H] @ weight [V, H]^T, [K, V] in the compute dtype."""
    compute = compute_dtype(hidden.dtype)
    return hidden.to(compute) @ weight.to(compute).t()


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, vocab: int, temperature: float, group: Group
    ) -> tuple[Tensor, Tensor]:
        # This rank's part of the vocabulary: `live` tokens from `start` on, followed by padding.
        start = 0 if group is None else dist.get_rank(group) * weight.shape[0]
        live = min(max(vocab - start, 0), weight.shape[0])
        # All ranks must use the same chunks, because they exchange sums chunk by chunk.
        rows = max(1, CHUNK_BYTES // (4 * max(weight.shape[0], 1)))
        log_probs = []
        entropies = []
        log_norms = []
        head = weight[:live]
        for chunk_hidden, chunk_ids in zip(hidden.split(rows), ids.split(rows), strict=True):
            # The largest logit of all ranks, so that no exponential overflows.
            logits = _scaled_logits(chunk_hidden, head, temperature)
            peak = logits.max(dim=-1).values if live else logits.new_full((len(chunk_ids),), float("-inf"))
            _reduce(peak, dist.ReduceOp.MAX, group)

            # Only one rank has the logit of the id; the others add 0.
            local_ids = chunk_ids - start
            in_shard = (local_ids >= 0) & (local_ids < live)
            picked = torch.zeros_like(peak)
            # A shard that is all padding has no logit to pick.
            if live:
                picked = logits.gather(-1, local_ids.clamp(0, live - 1).unsqueeze(-1)).squeeze(-1) * in_shard

            # One message for the three sums: the normaliser, the id's logit and the mean logit.
            exp = (logits - peak.unsqueeze(-1)).exp()
            sums = torch.stack((exp.sum(-1), picked, (exp * logits).sum(-1)))
            _reduce(sums, dist.ReduceOp.SUM, group)

            # log p = logit - log Z and H = log Z - mean logit, in nats.
            log_norm = peak + sums[0].log()
            log_probs.append(sums[1] - log_norm)
            entropies.append(log_norm - sums[2] / sums[0])
            log_norms.append(log_norm)

        # With these, the backward pass recomputes the logits but exchanges no sums.
        empty = hidden.new_zeros(0, dtype=compute_dtype(hidden.dtype))
        log_prob, entropy, log_norm = (torch.cat(x) if x else empty for x in (log_probs, entropies, log_norms))
        ctx.save_for_backward(hidden, weight, ids, log_norm, entropy)
        ctx.settings = (start, live, rows, temperature, group)
        return log_prob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, weight, ids, log_norm, entropy = ctx.saved_tensors
        start, live, rows, temperature, group = ctx.settings

        # Gradients are summed over chunks in the compute dtype.
        grad_hidden = torch.zeros_like(hidden, dtype=compute_dtype(hidden.dtype))
        needs_weight = ctx.needs_input_grad[1]
        grad_weight = torch.zeros_like(weight, dtype=compute_dtype(weight.dtype)) if needs_weight else None
        # Rows without a gradient are skipped, because they may hold NaN and 0 * NaN is NaN.
        with_gradient = ((grads[0] != 0) | (grads[1] != 0)).nonzero().squeeze(-1)
        head = weight[:live]
        for chunk in with_gradient.split(rows) if live else ():
            chunk_hidden = hidden[chunk]
            log_p = _scaled_logits(chunk_hidden, head, temperature) - log_norm[chunk].unsqueeze(-1)

            # d log p(t) / d logits = onehot(t) - p and dH / d logits = -p (log p + H), then through the temperature.
            log_prob_grad, entropy_grad = (g[chunk].unsqueeze(-1) for g in grads)
            d_logits = log_p.exp().mul_(-(log_prob_grad + entropy_grad * (log_p + entropy[chunk].unsqueeze(-1))))
            # Add the onehot of the id on the rank that has it.
            local_ids = (ids[chunk] - start).unsqueeze(-1)
            in_shard = (local_ids >= 0) & (local_ids < live)
            d_logits.scatter_add_(-1, local_ids.clamp(0, live - 1), in_shard * log_prob_grad)
            d_logits = d_logits.div_(temperature).to(hidden.dtype)
            grad_hidden[chunk] = (d_logits @ head).to(grad_hidden.dtype)
            if grad_weight is not None:
                grad_weight[:live] += (d_logits.t() @ chunk_hidden).to(grad_weight.dtype)

        # Every rank has the contribution of its tokens to the gradient of hidden. Weight shards are not shared.
        _reduce(grad_hidden, dist.ReduceOp.SUM, group)
        return grad_hidden.to(hidden.dtype), None if grad_weight is None else grad_weight.to(weight.dtype), *(None,) * 4


def _scaled_logits(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    """Return the logits of hidden [rows, H] and head [V, H] over temperature, [rows, V] in the compute dtype."""
    return (hidden @ head.t()).to(compute_dtype(hidden.dtype)) / temperature


def _reduce(x: Tensor, op: Any, group: Group) -> None:
    if group is not None:
        dist.all_reduce(x, op, group=group)
