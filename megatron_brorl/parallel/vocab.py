"""Log-probabilities from hidden states through a vocabulary-parallel LM head, without holding [R, V].

Rank t of the tensor-parallel group holds rows [t * V/tp, (t+1) * V/tp) of the head. The softmax is merged over ranks
from each one's maximum and sum (as in Megatron's vocab-parallel cross entropy; Shoeybi et al. 2019, section 3). Logits
are formed in chunks of rows and formed again in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_BYTES = 64 << 20  # of logits held at a time


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab: int,
    temperature: float,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of the softmax at each position.

    hidden [R, H] is the same on every rank of `group`; weight [V/tp, H] is this rank's shard of the head, whose rows
    at and beyond `vocab` are padding and have no probability; targets [R] int64 below `vocab`. Returns two [R] tensors
    in float32 (float64 for float64 inputs), in nats, of softmax(hidden @ weight.T / temperature), both differentiable.
    """
    log_probs, entropy = _LinearLogProbs.apply(hidden, weight, targets, vocab, temperature, group)
    return log_probs, entropy


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab: int,
        temperature: float,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        start = dist.get_rank(group) * weight.shape[0]  # vocabulary row of this shard's first
        live = min(max(vocab - start, 0), weight.shape[0])  # rows of this shard that are not padding
        rows = max(1, CHUNK_BYTES // (4 * max(weight.shape[0], 1)))  # positions per chunk of logits

        log_probs, entropies, log_norms = [], [], []
        for h, t in zip(hidden.split(rows), targets.split(rows), strict=True):
            # This rank's logits, and the largest of all ranks', so that no exp overflows.
            logits = _logits(h, weight[:live], temperature)
            peak = logits.max(dim=-1).values if live else logits.new_full((len(h),), float("-inf"))
            _reduce(peak, dist.ReduceOp.MAX, group)

            # The target's logit, on the rank that holds its row of the head.
            own = t - start
            mine = (own >= 0) & (own < live)
            picked = torch.zeros_like(peak)
            if live:
                picked = logits.gather(-1, own.clamp(0, live - 1).unsqueeze(-1)).squeeze(-1) * mine

            exp = (logits - peak.unsqueeze(-1)).exp()
            # One message for the three sums: the normaliser, the target's logit and the mean logit.
            sums = torch.stack((exp.sum(-1), picked, (exp * logits).sum(-1)))
            _reduce(sums, dist.ReduceOp.SUM, group)

            log_norm = peak + sums[0].log()
            log_probs.append(sums[1] - log_norm)
            entropies.append(log_norm - sums[2] / sums[0])  # log Z minus the mean logit
            log_norms.append(log_norm)

        # A rank may have no rows at all.
        empty = hidden.new_zeros(0, dtype=_compute_dtype(hidden))
        log_prob, entropy, log_norm = (torch.cat(x) if x else empty for x in (log_probs, entropies, log_norms))

        ctx.save_for_backward(hidden, weight, targets, log_norm, entropy)
        ctx.settings = (start, live, rows, temperature, group)
        return log_prob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, weight, targets, log_norm, entropy = ctx.saved_tensors
        start, live, rows, temperature, group = ctx.settings
        grad_hidden = torch.zeros_like(hidden, dtype=_compute_dtype(hidden))  # added up in float32
        grad_weight = torch.zeros_like(weight, dtype=_compute_dtype(weight))

        # Rows without a gradient are left out, not multiplied by 0: what they hold may be NaN.
        counted = ((grads[0] != 0) | (grads[1] != 0)).nonzero().squeeze(-1)
        for chunk in counted.split(rows) if live else ():
            h = hidden[chunk]
            log_p = _logits(h, weight[:live], temperature) - log_norm[chunk].unsqueeze(-1)

            # d log p(t) / d logits = onehot(t) - p and dH / d logits = -p (log p + H), then through the temperature.
            upstream, of_entropy = (g[chunk].unsqueeze(-1) for g in grads)
            d = log_p.exp().mul_(-(upstream + of_entropy * (log_p + entropy[chunk].unsqueeze(-1))))

            # onehot(t), where this rank holds the target's row.
            own = targets[chunk] - start
            mine = (own >= 0) & (own < live)
            d.scatter_add_(-1, own.clamp(0, live - 1).unsqueeze(-1), mine.unsqueeze(-1) * upstream)

            d.div_(temperature)
            d = d.to(hidden.dtype)
            grad_hidden[chunk] = (d @ weight[:live]).to(grad_hidden.dtype)
            grad_weight[:live] += (d.t() @ h).to(grad_weight.dtype)

        # The hidden states are whole on every rank, and so is their gradient.
        _reduce(grad_hidden, dist.ReduceOp.SUM, group)
        return grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype), None, None, None, None


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    return (hidden @ weight.t()).to(_compute_dtype(hidden)) / temperature


def _reduce(x: Tensor, op: Any, group: dist.ProcessGroup) -> None:
    if dist.get_world_size(group) > 1:
        dist.all_reduce(x, op, group=group)
