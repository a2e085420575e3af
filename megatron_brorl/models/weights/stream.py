"""Convert the weights of any training layout to a stream of (Hugging Face name, full tensor), the same on every rank.

A bucket holds consecutive entries of one pipeline stage. It costs one gather over the stage's tensor-parallel ranks and
one broadcast to the other stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_brorl.models.weights.layouts import WeightEntry, to_hf
from megatron_brorl.ops.checksum import ChecksummedTensor, checksum
from megatron_brorl.parallel.grid import Grid

BUCKET_BYTES = 64 << 20


def make_buckets(entries: Sequence[WeightEntry], item_bytes: int, limit: int = BUCKET_BYTES) -> list[list[WeightEntry]]:
    """Split the entries into buckets of at most `limit` bytes of full tensors. A larger entry gets its own bucket.

    item_bytes: size of one element.
    """
    buckets: list[list[WeightEntry]] = []
    size = 0
    for entry in entries:
        added = item_bytes * sum(math.prod(shape) for shape in entry.hf_shapes)
        if not buckets or buckets[-1][0].stage != entry.stage or size + added > limit:
            buckets.append([])
            size = 0
        buckets[-1].append(entry)
        size += added
    return buckets


def stream(
    buckets: Sequence[Sequence[WeightEntry]],
    kv_heads: int,
    parameters: Mapping[str, Tensor],
    grid: Grid,
    dtype: torch.dtype,
) -> Iterator[ChecksummedTensor]:
    """Yield every full tensor [WeightEntry.hf_shapes] once, in the order of the buckets, on every rank of the grid.

    parameters: this rank's parts under WeightEntry.megatron names. Collective: every rank must consume the stream to
    its end. Checksums are computed on the stage that owns a tensor, before it is sent. The tensors are views of a
    bucket, or of the parameters if nothing had to be gathered. Copy them to keep them.
    """
    device = next(iter(parameters.values())).device
    for bucket in buckets:
        names = [name for entry in bucket for name in entry.hf]
        full: list[Tensor] = []
        sums = torch.empty(len(names), dtype=torch.int64, device=device)
        if bucket[0].stage == grid.pp_rank:
            full = _gather(bucket, kv_heads, parameters, grid)
            torch.stack([checksum(name, x) for name, x in zip(names, full, strict=True)], out=sums)

        if grid.pp_size > 1:
            shapes = [shape for entry in bucket for shape in entry.hf_shapes]
            if full:
                message = torch.cat([x.flatten() for x in full]).to(dtype)
            else:
                message = torch.empty(sum(map(math.prod, shapes)), dtype=dtype, device=device)
            owner = dist.get_global_rank(grid.groups.pp, bucket[0].stage)  # in this rank's own pipeline
            dist.broadcast(message, owner, group=grid.groups.pp)
            dist.broadcast(sums, owner, group=grid.groups.pp)
            full = _split(message, shapes)

        for name, tensor, total in zip(names, full, sums, strict=True):
            yield ChecksummedTensor(name, tensor, total)


def _gather(bucket: Sequence[WeightEntry], kv_heads: int, parameters: Mapping[str, Tensor], grid: Grid) -> list[Tensor]:
    """Return the full Hugging Face tensors of a bucket; a collective of the tensor-parallel ranks of its stage."""
    local = [parameters[entry.megatron].detach() for entry in bucket]
    sharded = [x for entry, x in zip(bucket, local, strict=True) if entry.layout != "replicated"]
    parts: Iterator[Sequence[Tensor]] = iter([(x,) for x in sharded])
    if grid.tp_size > 1 and sharded:
        own = torch.cat([x.flatten() for x in sharded])
        messages = [torch.empty_like(own) for _ in range(grid.tp_size)]
        dist.all_gather(messages, own, group=grid.groups.tp)
        shapes = [tuple(x.shape) for x in sharded]
        parts = zip(*(_split(message, shapes) for message in messages), strict=True)

    full: list[Tensor] = []
    for entry, tensor in zip(bucket, local, strict=True):
        of_ranks = (tensor,) if entry.layout == "replicated" else next(parts)
        full.extend(x.contiguous() for x in to_hf(entry, of_ranks, kv_heads))
    return full


def _split(message: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    parts = message.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
