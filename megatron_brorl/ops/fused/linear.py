"""Log-probabilities and the policy loss from hidden states without [R, V] logits, on one rank or many.

Every chunk of rows takes a product to logits, csrc's passes over them, and products to the gradients. Under tensor
parallelism each rank of `group` holds its rows of the LM head. Python merges the softmax statistics of the ranks, so
csrc contains no communication. ops.reference.linear defines the results.

A token's policy gradient depends only on its own log-probability, so linear_ppo_loss computes the gradients in the
forward pass, with three products in total (as Liger-Kernel's fused losses do). A ratio over the whole sequence is known
only after all of its tokens. It and a loss of the user take linear_log_probs and its backward pass, four products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_brorl.algo.policy_loss import SUMS, PolicyLoss, PolicyLossSettings, PolicyTokens, policy_loss
from megatron_brorl.ops.fused.native import check_devices
from megatron_brorl.ops.fused.softmax import Shard, gemm_, merged, ppo_tokens, softmax_gradient_, softmax_statistics
from megatron_brorl.ops.interface import compute_dtype

# Rows of logits held at a time. Fewer make the products slower, because every chunk reads and writes the weight's
# gradient. More only take memory. CHUNK_BYTES lowers the number for very large vocabularies.
CHUNK_ROWS = {"cpu": 512, "cuda": 2048}
FEWEST_ROWS = 64
CHUNK_BYTES = 1 << 30
ROWS_MOVED = 16  # rows of logits copied at a time


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    temperature: float,
    group: dist.ProcessGroup | None = None,
    vocab: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute reference.linear_log_probs chunk by chunk. The backward pass recomputes the logits.

    hidden [R, H] and weight [V, H] are both float32, bfloat16 or float64; products accumulate in at least float32. Rows
    of weight from `vocab` on are padding, without probability and gradient. With a group, hidden and ids are the
    same on all its ranks, weight is this rank's shard [V/tp, H], and the gradient of hidden is summed over the group.
    Raises ValueError for a shape, value or device, TypeError for a dtype, and on a CPU IndexError for an id outside the
    vocabulary (on a GPU this check would wait for the device).
    """
    shard = _shard("linear_log_probs", hidden, weight, ids, temperature, group, vocab)
    log_probs, entropy = _FusedLogProbs.apply(hidden, weight, ids, shard)
    return log_probs, entropy


def linear_ppo_loss(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    tokens: PolicyTokens,
    settings: PolicyLossSettings,
    temperature: float,
    group: dist.ProcessGroup | None = None,
    vocab: int | None = None,
) -> PolicyLoss:
    """Compute reference.linear_ppo_loss; matrices, group, vocab and errors as in linear_log_probs.

    The log-probabilities are bitwise those of linear_log_probs on the same rows. Unless settings.of_sequences, the
    forward pass computes the gradients and the backward pass scales them in place, so a second backward pass raises
    RuntimeError.
    """
    shard = _shard("linear_ppo_loss", hidden, weight, ids, temperature, group, vocab)
    check_devices("linear_ppo_loss", hidden, *vars(tokens).values())
    if settings.of_sequences:
        log_probs, entropy = _FusedLogProbs.apply(hidden, weight, ids, shard)
        return policy_loss(log_probs, entropy, tokens, settings)
    wanted = (hidden.requires_grad, weight.requires_grad) if torch.is_grad_enabled() else (False, False)
    loss, log_probs, entropy, columns = _FusedPpoLoss.apply(hidden, weight, ids, tokens, settings, shard, wanted)
    return PolicyLoss(loss, log_probs, entropy, _metrics(columns, entropy, tokens.weights))


def linear_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return logits [K, V] of hidden [K, H] and weight [V, H], as reference.linear_logits; not differentiable."""
    logits = hidden.new_empty(len(hidden), len(weight), dtype=compute_dtype(hidden.dtype))
    gemm_(logits, hidden, weight.t(), accumulate=False)
    return logits


def _shard(
    op: str,
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    temperature: float,
    group: dist.ProcessGroup | None,
    vocab: int | None,
) -> Shard:
    """Return this rank's shard; csrc checks all other shapes and dtypes. Raises as linear_log_probs says."""
    check_devices(op, hidden, weight, ids)
    if ids.shape != hidden.shape[:1]:
        raise ValueError(f"{op}: ids must be [{len(hidden)}], got {list(ids.shape)}")
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    vocab = len(weight) * ranks if vocab is None else vocab
    if not 0 < vocab <= len(weight) * ranks:
        raise ValueError(f"{op}: a vocabulary of {vocab} does not fit {ranks} x {len(weight)} rows of weight")
    # On a GPU this check would wait for the device.
    if ids.device.type == "cpu" and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise IndexError(f"{op}: ids are from {ids.min()} to {ids.max()}, outside a vocabulary of {vocab}")

    # Padding ends the last shards, one of which may hold nothing else.
    start = rank * len(weight)
    live = min(max(vocab - start, 0), len(weight))
    return Shard(start, live, temperature, group if ranks > 1 else None)


def _metrics(columns: Tensor, entropy: Tensor, weights: Tensor) -> Tensor:
    """Return SUMS and MAXIMA of the columns [R, 8] of ppo_tokens, as PolicyLoss.metrics."""
    live = weights != 0
    counted = torch.where(live, entropy, 0.0)  # where instead of a product, because 0 * nan is nan
    values = torch.cat((columns.double(), counted.unsqueeze(1), live.unsqueeze(1)), dim=1)
    largest = values.max(dim=0).values if len(values) else values.new_zeros(len(SUMS))
    ratio, gap = SUMS.index("ratio"), SUMS.index("rollout_gap")
    return torch.cat((values.sum(dim=0), torch.stack((largest[ratio], largest[gap]))))


@dataclass
class _Chunk:
    rows: slice
    hidden: Tensor  # [count, H]
    ids: Tensor
    logits: Tensor  # [count, V_local]; the next chunk reuses the memory
    statistics: Tensor  # [count, 4], of the whole vocabulary

    def log_probs(self, shard: Shard) -> Tensor:
        """Return log-probabilities of the ids [count], in nats."""
        largest, total, _, target = self.statistics.unbind(1)
        # Rounding here makes the ratio of an unchanged policy to its stored log-probabilities exactly 1.
        return ((target - largest) / shard.temperature - total.log()).to(self.logits.dtype)

    def entropy(self) -> Tensor:
        """Return the entropy of each row [count], in nats."""
        _, total, weighted, _ = self.statistics.unbind(1)
        return (total.log() - weighted / total).to(self.logits.dtype)


def _chunks(hidden: Tensor, weight: Tensor, ids: Tensor, shard: Shard) -> Iterator[_Chunk]:
    compute = compute_dtype(hidden.dtype)
    # Padding counts, because all ranks must use the same chunks.
    fitting = CHUNK_BYTES // (len(weight) * compute.itemsize)
    size = min(len(hidden), max(FEWEST_ROWS, min(fitting, CHUNK_ROWS[hidden.device.type])))
    buffer = hidden.new_empty((size, shard.live), dtype=compute)
    for begin in range(0, len(hidden), max(size, 1)):
        rows = slice(begin, min(begin + size, len(hidden)))
        h = hidden[rows]
        t = ids[rows]
        logits = buffer[: rows.stop - begin]
        gemm_(logits, h, weight[: shard.live].t(), accumulate=False)
        yield _Chunk(rows, h, t, logits, merged(softmax_statistics(logits, t, shard), shard))


def _live_first(live: Tensor) -> Tensor:
    """Return the L live rows of live [count] bool in the order that moves fewest: rows beyond L fill the gaps."""
    total = int(live.sum())
    order = torch.arange(total, device=live.device)
    order[(~live[:total]).nonzero().squeeze(-1)] = live[total:].nonzero().squeeze(-1) + total
    return order


def _gather_rows_(matrix: Tensor, order: Tensor) -> None:
    """Set matrix[:L] = matrix[order] for the order of _live_first, with little extra memory."""
    moved = (order != torch.arange(len(order), device=order.device)).nonzero().squeeze(-1)
    for part in moved.split(ROWS_MOVED):
        matrix[part] = matrix[order[part]]


class _Gradients:
    """The gradients of hidden and weight, summed chunk by chunk in the compute dtype."""

    def __init__(self, hidden: Tensor, weight: Tensor, shard: Shard, wanted: tuple[bool, bool]) -> None:
        compute = compute_dtype(hidden.dtype)
        self.weight = weight[: shard.live]
        self.shard = shard
        self.of_hidden = hidden.new_empty(hidden.shape, dtype=compute) if wanted[0] else None
        self.of_weight = weight.new_empty(weight.shape, dtype=compute) if wanted[1] else None
        if self.of_weight is not None:
            self.of_weight[shard.live if len(hidden) else 0 :].zero_()  # no chunk writes these rows

    def add(self, chunk: _Chunk, log_prob_gradient: Tensor, entropy_gradient: Tensor | None) -> None:
        """Add a chunk. Rows without a gradient (clipped, masked, no group signal) are left out of the products."""
        if self.of_hidden is None and self.of_weight is None:
            return

        # Move the rows that have a gradient to the front.
        live = log_prob_gradient != 0
        if entropy_gradient is not None:
            live |= entropy_gradient != 0
        order = _live_first(live)
        if len(order) < len(live):
            # Logits are moved in place. The other tensors are small and are copied.
            _gather_rows_(chunk.logits, order)
            hidden, ids, statistics = chunk.hidden[order], chunk.ids[order], chunk.statistics[order]
            log_prob_gradient = log_prob_gradient[order]
            entropy_gradient = None if entropy_gradient is None else entropy_gradient[order]
        else:
            hidden, ids, statistics = chunk.hidden, chunk.ids, chunk.statistics

        # The gradient overwrites the logits.
        d = chunk.logits[: len(order)]
        narrow = hidden.dtype == torch.bfloat16
        softmax_gradient_(d, ids, statistics, log_prob_gradient, entropy_gradient, self.shard, narrow)
        if narrow:  # it is in the first half of each row
            d = d.view(torch.bfloat16)[:, : d.shape[1]]

        # Two products give the gradients of hidden, 0 in all other rows, and of the weight, summed over chunks.
        if self.of_hidden is not None:
            rows = self.of_hidden[chunk.rows]
            if len(order) < len(live):
                # A product writes adjacent rows, which are then moved to their places.
                product = rows.new_empty(len(order), rows.shape[1])
                gemm_(product, d, self.weight, accumulate=False)
                rows.zero_()[order] = product
            else:
                gemm_(rows, d, self.weight, accumulate=False)
        # The first chunk writes and the others add, so the memory need not be zeroed.
        if self.of_weight is not None:
            gemm_(self.of_weight[: self.shard.live], d.t(), hidden, accumulate=chunk.rows.start > 0)

    def finished(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of hidden [R, H], summed over the group, and of weight [V_local, H], or None."""
        if self.of_hidden is not None and self.shard.group is not None:
            dist.all_reduce(self.of_hidden, group=self.shard.group)
        return tuple(None if g is None else g.to(dtype) for g in (self.of_hidden, self.of_weight))  # type: ignore[return-value]


class _FusedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
        log_probs = hidden.new_empty(len(hidden), dtype=compute_dtype(hidden.dtype))
        entropy = torch.empty_like(log_probs)
        for chunk in _chunks(hidden, weight, ids, shard):
            log_probs[chunk.rows] = chunk.log_probs(shard)
            entropy[chunk.rows] = chunk.entropy()
        ctx.save_for_backward(hidden, weight, ids)
        ctx.shard = shard
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, ids = ctx.saved_tensors
        gradients = _Gradients(hidden, weight, ctx.shard, ctx.needs_input_grad[:2])
        with_entropy = bool(upstream[1].any())
        for chunk in _chunks(hidden, weight, ids, ctx.shard):
            gradients.add(chunk, upstream[0][chunk.rows], upstream[1][chunk.rows] if with_entropy else None)
        return (*gradients.finished(hidden.dtype), None, None)


class _FusedPpoLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        tokens: PolicyTokens,
        settings: PolicyLossSettings,
        shard: Shard,
        wanted: tuple[bool, bool],
    ) -> tuple[Tensor, ...]:
        log_probs = hidden.new_empty(len(hidden), dtype=compute_dtype(hidden.dtype))
        entropy = torch.empty_like(log_probs)
        gradients = _Gradients(hidden, weight, shard, wanted)

        columns = []
        for chunk in _chunks(hidden, weight, ids, shard):
            log_prob, row_entropy = chunk.log_probs(shard), chunk.entropy()
            log_probs[chunk.rows], entropy[chunk.rows] = log_prob, row_entropy
            # The op returns the derivatives in log-probability and entropy together with the loss.
            first, second, column = ppo_tokens(log_prob, row_entropy, tokens.where(chunk.rows), settings)
            columns.append(column)
            # The next chunk overwrites these logits.
            gradients.add(chunk, first, second if settings.entropy_coef else None)

        table = torch.cat(columns) if columns else log_probs.new_zeros(0, len(SUMS) - 2)
        loss = table[:, 0].double().sum().to(log_probs.dtype)
        # save_for_backward would keep a reference, so that autograd would copy the gradients.
        ctx.gradients = gradients.finished(hidden.dtype)
        # Only the loss has a gradient; do not create zeros for the others.
        ctx.mark_non_differentiable(log_probs, entropy, table)
        ctx.set_materialize_grads(False)
        return loss, log_probs, entropy, table

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("linear_ppo_loss: a result allows one backward pass")
        scale = upstream[0]
        return (*(None if g is None or scale is None else g.mul_(scale) for g in gradients), *(None,) * 5)
