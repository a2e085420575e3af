"""Log-probabilities and the policy loss from hidden states without [R, V] logits, on one rank or many.

Logits are computed for a chunk of rows at a time. Under tensor parallelism each rank holds its rows of the LM head, and
Python merges the softmax statistics of the ranks. ops.reference.linear defines the results.

A token's policy gradient depends only on its own log-probability. linear_ppo_loss therefore computes the gradients in
the forward pass, with three products in total (as Liger-Kernel's fused losses do). A ratio over the whole sequence and
a loss of the user need all tokens first, so they take linear_log_probs and its backward pass, four products.
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
from megatron_brorl.ops.interface import Group, compute_dtype

# Rows of logits held at a time. Fewer make the products slower, because every chunk reads and writes the weight's
# gradient. More only take memory. CHUNK_BYTES lowers the number for very large vocabularies.
CHUNK_ROWS = {"cpu": 512}  # on a GPU: see chunk_rows
FEWEST_ROWS = 64  # smallest chunk
CHUNK_BYTES = 1 << 30  # of logits
ROWS_MOVED = 16  # rows of logits copied at a time
TILE = (128, 256)  # rows and columns of a product that one multiprocessor of a GPU computes at a time
VECTOR = 4  # logits that a GPU reads at a time


def linear_log_probs(
    hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float, group: Group = None, vocab: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute reference.linear_log_probs chunk by chunk. The backward pass recomputes the logits.

    hidden and weight are both float32, bfloat16 or float64; products accumulate in at least float32. Raises ValueError
    for a shape, value or device, TypeError for a dtype, and on a CPU IndexError for an id outside the vocabulary (on a
    GPU this check would wait for the device).
    """
    shard = _shard("linear_log_probs", hidden, weight, ids, temperature, group, vocab)
    return _FusedLogProbs.apply(hidden, weight, ids, shard)


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
    """Compute reference.linear_ppo_loss; matrices, group, vocab and errors as in linear_log_probs.

    The log-probabilities are bitwise those of linear_log_probs on the same rows. On a GPU this requires that every row
    has a gradient: rows without one are sorted to the end. Unless settings.of_sequences, the backward pass scales the
    gradients of the forward pass in place, so a second backward pass raises RuntimeError.
    """
    shard = _shard("linear_ppo_loss", hidden, weight, ids, temperature, group, vocab)
    check_devices("linear_ppo_loss", hidden, *vars(tokens).values())
    if settings.of_sequences:
        log_probs, entropy = _FusedLogProbs.apply(hidden, weight, ids, shard)
        return policy_loss(log_probs, entropy, tokens, settings)
    needs_grad = (hidden.requires_grad, weight.requires_grad) if torch.is_grad_enabled() else (False, False)
    order = None
    trained = len(hidden)
    if not _drops_rows_per_chunk(hidden):
        has_gradient = tokens.weights != 0
        if not settings.kl_coef and not settings.entropy_coef:
            has_gradient &= tokens.advantages != 0
        trained, order = _trained_first(has_gradient)
    if order is not None:
        hidden, ids, tokens = hidden.index_select(0, order), ids[order], tokens.where(order)
    loss, log_probs, entropy, columns = _FusedPpoLoss.apply(
        hidden, weight, ids, tokens, settings, shard, needs_grad, trained
    )
    metrics = _metrics(columns, entropy, tokens.weights)
    if order is not None:
        log_probs, entropy = (torch.empty_like(x).index_copy_(0, order, x) for x in (log_probs, entropy))
    return PolicyLoss(loss, log_probs, entropy, metrics)


@torch.no_grad()  # Without AVX-512 the product is torch's, which refuses inputs with gradients.
def linear_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return logits [K, V] of hidden [K, H] and weight [V, H], as reference.linear_logits; not differentiable."""
    logits = hidden.new_empty(len(hidden), len(weight), dtype=compute_dtype(hidden.dtype))
    gemm_(logits, hidden, weight.t(), accumulate=False)
    return logits


def _shard(
    op: str, hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float, group: Group, vocab: int | None
) -> Shard:
    """Return this rank's shard; csrc checks all other shapes and dtypes. Raises as linear_log_probs says."""
    check_devices(op, hidden, weight, ids)
    if ids.shape != hidden.shape[:1]:
        raise ValueError(f"{op}: ids must be [{len(hidden)}], got {list(ids.shape)}")
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    vocab = len(weight) * ranks if vocab is None else vocab
    if not 0 < vocab <= len(weight) * ranks:
        raise ValueError(f"{op}: a vocabulary of {vocab} does not fit {ranks} x {len(weight)} rows of weight")
    if ids.device.type == "cpu" and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise IndexError(f"{op}: ids are from {ids.min()} to {ids.max()}, outside a vocabulary of {vocab}")

    # Padding ends the last shards, one of which may hold nothing else.
    start = rank * len(weight)
    live = min(max(vocab - start, 0), len(weight))
    return Shard(start, live, temperature, group if ranks > 1 else None)


def _metrics(columns: Tensor, entropy: Tensor, weights: Tensor) -> Tensor:
    """Return SUMS and MAXIMA of the columns [R, 8] of ppo_tokens, as PolicyLoss.metrics."""
    unmasked = weights != 0
    unmasked_entropy = torch.where(unmasked, entropy, 0.0)  # where instead of a product, because 0 * nan is nan
    values = torch.cat((columns.double(), unmasked_entropy.unsqueeze(1), unmasked.unsqueeze(1)), dim=1)
    largest = values.max(dim=0).values if len(values) else values.new_zeros(len(SUMS))
    ratio, gap = SUMS.index("ratio"), SUMS.index("rollout_gap")
    return torch.cat((values.sum(dim=0), torch.stack((largest[ratio], largest[gap]))))


def _drops_rows_per_chunk(hidden: Tensor) -> bool:
    """Return whether every chunk drops its rows without a gradient before the products.

    To count these rows, a GPU would have to wait in every chunk. There, they are dropped once, before the first chunk.
    """
    return hidden.device.type == "cpu"


def _trained_first(has_gradient: Tensor) -> tuple[int, Tensor | None]:
    """Return the number of true rows of has_gradient [R], and the order [R] with these first, or None if all are."""
    trained = int(has_gradient.sum())
    return trained, None if trained == len(has_gradient) else has_gradient.argsort(descending=True, stable=True)


@dataclass
class _Chunk:
    rows: slice
    hidden: Tensor  # [count, H]
    ids: Tensor
    logits: Tensor  # [count, V_local]; the next chunk reuses the memory
    statistics: Tensor  # [count, 4], over the whole vocabulary
    trained: int  # number of leading rows that may have a gradient

    def write(self, log_probs: Tensor, entropy: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
        """Write this chunk's rows of log_probs (of the ids) and entropy, both [R] in nats, and return these rows."""
        largest, total, weighted, target = self.statistics.unbind(1)
        log_total = total.log()
        # Stored log-probabilities are rounded here, too, so the ratio of an unchanged policy to them is exactly 1.
        return (
            torch.sub((target - largest) / shard.temperature, log_total, out=log_probs[self.rows]),
            torch.sub(log_total, weighted / total, out=entropy[self.rows]),
        )


def chunk_rows(hidden: Tensor, weight: Tensor) -> int:
    """Return the number of rows of a chunk. It depends on the kind of the device, but not on its free memory.

    All ranks therefore use the same chunks, and repeated runs sum in the same order.
    """
    row_bytes = len(weight) * compute_dtype(hidden.dtype).itemsize  # padding counts: all ranks must agree
    max_rows, max_bytes = CHUNK_ROWS.get(hidden.device.type), CHUNK_BYTES
    if max_rows is None:
        # Choose as many tiles of the gradient of hidden as there are multiprocessors, or a few less. Every tile sums
        # over the vocabulary, so a second, nearly empty wave would take as long as the first.
        gpu = torch.cuda.get_device_properties(hidden.device)
        columns = -(-hidden.shape[1] // TILE[1])
        max_rows = TILE[0] * max(gpu.multi_processor_count // columns, 1)
        max_bytes = min(2 * CHUNK_BYTES, gpu.total_memory // 32)
    return max(FEWEST_ROWS, min(max_bytes // row_bytes, max_rows))


def _chunks(hidden: Tensor, weight: Tensor, ids: Tensor, shard: Shard, trained: int) -> Iterator[_Chunk]:
    """Yield the chunks in order. trained: number of leading rows that may have a gradient."""
    size = min(len(hidden), chunk_rows(hidden, weight))
    # Kernels and cuBLAS are faster if every row begins at a multiple of 16 bytes.
    width = -(-shard.live // VECTOR) * VECTOR
    buffer = hidden.new_empty((size, width), dtype=compute_dtype(hidden.dtype))[:, : shard.live]
    for begin in range(0, len(hidden), max(size, 1)):
        rows = slice(begin, min(begin + size, len(hidden)))
        chunk_hidden = hidden[rows]
        chunk_ids = ids[rows]
        logits = buffer[: rows.stop - begin]
        gemm_(logits, chunk_hidden, weight[: shard.live].t(), accumulate=False)
        statistics = merged(softmax_statistics(logits, chunk_ids, shard), shard)
        yield _Chunk(rows, chunk_hidden, chunk_ids, logits, statistics, min(max(trained - begin, 0), len(chunk_ids)))


def _fill_gaps(has_gradient: Tensor) -> Tensor:
    """Return the indices [n] of the n true rows: of those below n each at its own index, and the others in the gaps."""
    total = int(has_gradient.sum())
    order = torch.arange(total, device=has_gradient.device)
    order[(~has_gradient[:total]).nonzero().squeeze(-1)] = has_gradient[total:].nonzero().squeeze(-1) + total
    return order


class _Gradients:
    """The gradients of hidden and weight, summed chunk by chunk in the compute dtype."""

    def __init__(self, hidden: Tensor, weight: Tensor, shard: Shard, needs_grad: tuple[bool, bool]) -> None:
        compute = compute_dtype(hidden.dtype)
        self.weight = weight[: shard.live]
        self.shard = shard
        self.hidden_grad = hidden.new_empty(hidden.shape, dtype=compute) if needs_grad[0] else None
        self.weight_grad = weight.new_empty(weight.shape, dtype=compute) if needs_grad[1] else None
        if self.weight_grad is not None:
            self.weight_grad[shard.live if len(hidden) else 0 :].zero_()  # no chunk writes these rows

    def add(self, chunk: _Chunk, log_prob_gradient: Tensor, entropy_gradient: Tensor | None) -> None:
        """Add a chunk. Rows without a gradient (clipped, masked, no group signal) are left out of the products."""
        if self.hidden_grad is None and self.weight_grad is None:
            return

        kept: Tensor | slice = slice(chunk.trained)  # rows of the chunk that the products take
        if _drops_rows_per_chunk(chunk.hidden):
            has_gradient = log_prob_gradient != 0
            if entropy_gradient is not None:
                has_gradient |= entropy_gradient != 0
            order = _fill_gaps(has_gradient)
            if len(order) < len(has_gradient):
                # Logits are moved in place, a few rows at a time. The other tensors are small and are copied.
                gaps = (order != torch.arange(len(order), device=order.device)).nonzero().squeeze(-1)
                for part in gaps.split(ROWS_MOVED):
                    chunk.logits[part] = chunk.logits[order[part]]
                kept = order
        hidden, ids, statistics = chunk.hidden[kept], chunk.ids[kept], chunk.statistics[kept]
        log_prob_gradient = log_prob_gradient[kept]
        entropy_gradient = None if entropy_gradient is None else entropy_gradient[kept]

        # The gradient overwrites the logits.
        d_logits = chunk.logits[: len(ids)]
        to_bfloat16 = hidden.dtype == torch.bfloat16
        softmax_gradient_(d_logits, ids, statistics, log_prob_gradient, entropy_gradient, self.shard, to_bfloat16)
        if to_bfloat16:  # the gradient is in the first half of each row
            d_logits = d_logits.view(torch.bfloat16)[:, : d_logits.shape[1]]

        # Two products give the gradients of hidden, 0 in all other rows, and of the weight, summed over chunks.
        if self.hidden_grad is not None:
            chunk_grad = self.hidden_grad[chunk.rows]
            if isinstance(kept, Tensor):
                # A product writes adjacent rows, which are then moved to where they belong.
                product = chunk_grad.new_empty(len(kept), chunk_grad.shape[1])
                gemm_(product, d_logits, self.weight, accumulate=False)
                chunk_grad.zero_()[kept] = product
            else:
                gemm_(chunk_grad[kept], d_logits, self.weight, accumulate=False)
                chunk_grad[chunk.trained :] = 0
        # The first chunk writes and the others add, so the memory need not be zeroed.
        if self.weight_grad is not None:
            gemm_(self.weight_grad[: self.shard.live], d_logits.t(), hidden, accumulate=chunk.rows.start > 0)

    def finished(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of hidden [R, H], summed over the group, and of weight [V_local, H], or None."""
        if self.hidden_grad is not None and self.shard.group is not None:
            dist.all_reduce(self.hidden_grad, group=self.shard.group)
        return tuple(None if g is None else g.to(dtype) for g in (self.hidden_grad, self.weight_grad))  # type: ignore[return-value]


class _FusedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
        log_probs = hidden.new_empty(len(hidden), dtype=compute_dtype(hidden.dtype))
        entropy = torch.empty_like(log_probs)
        for chunk in _chunks(hidden, weight, ids, shard, trained=0):
            chunk.write(log_probs, entropy, shard)
        ctx.save_for_backward(hidden, weight, ids)
        ctx.shard = shard
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, ids = ctx.saved_tensors
        shape = hidden.shape
        rows = None
        if not _drops_rows_per_chunk(hidden):
            trained, order = _trained_first((upstream[0] != 0) | (upstream[1] != 0))
            if order is not None:
                rows = order[:trained]
                hidden, ids, *upstream = (x[rows] for x in (hidden, ids, *upstream))  # type: ignore[assignment]
        gradients = _Gradients(hidden, weight, ctx.shard, ctx.needs_input_grad[:2])
        with_entropy = bool(upstream[1].any())
        for chunk in _chunks(hidden, weight, ids, ctx.shard, trained=len(hidden)):
            gradients.add(chunk, upstream[0][chunk.rows], upstream[1][chunk.rows] if with_entropy else None)
        hidden_grad, weight_grad = gradients.finished(hidden.dtype)
        if rows is not None and hidden_grad is not None:
            hidden_grad = hidden_grad.new_zeros(shape).index_copy_(0, rows, hidden_grad)
        return hidden_grad, weight_grad, None, None


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
        needs_grad: tuple[bool, bool],
        trained: int,
    ) -> tuple[Tensor, ...]:
        log_probs = hidden.new_empty(len(hidden), dtype=compute_dtype(hidden.dtype))
        entropy = torch.empty_like(log_probs)
        gradients = _Gradients(hidden, weight, shard, needs_grad)

        def columns_of(chunk: _Chunk) -> Tensor:
            written = chunk.write(log_probs, entropy, shard)
            log_prob_gradient, entropy_gradient, columns = ppo_tokens(*written, tokens.where(chunk.rows), settings)
            # Add the gradients now, because the next chunk overwrites the logits.
            gradients.add(chunk, log_prob_gradient, entropy_gradient if settings.entropy_coef else None)
            return columns

        # A loop variable would keep the last logits in memory while the gradients are converted.
        columns = [columns_of(chunk) for chunk in _chunks(hidden, weight, ids, shard, trained)]
        table = torch.cat(columns) if columns else log_probs.new_zeros(0, SUMS.index("entropy"))
        loss = table[:, SUMS.index("loss")].double().sum().to(log_probs.dtype)
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
        return (*(None if g is None or scale is None else g.mul_(scale) for g in gradients), *(None,) * 6)
