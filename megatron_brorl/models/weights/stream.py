"""Convert the weights of any training layout to a stream of (Hugging Face name, full tensor), the same on every rank.

A bucket holds entries of one pipeline stage. It costs one gather over the stage's tensor-parallel ranks, one over its
expert-parallel ranks, and one broadcast to the other stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_brorl.models.weights.layouts import WeightEntry, to_hf
from megatron_brorl.ops.checksum import ChecksummedTensor, checksum
from megatron_brorl.parallel.grid import Grid

BUCKET_BYTES = 64 << 20


def make_buckets(
    entries: Sequence[WeightEntry], item_bytes: int, limit: int = BUCKET_BYTES, expert_ranks: int = 1
) -> list[list[WeightEntry]]:
    """Split the entries into buckets of at most `limit` bytes of full tensors. A larger entry gets its own bucket.

    item_bytes: size of one element. expert_ranks: ranks over which experts are distributed. The entries of the
    k-th expert of every rank are in one bucket, in the order of the ranks, so that one gather can send all of them. If
    these entries are larger than `limit`, they are the only ones of their bucket.
    """
    buckets: list[list[WeightEntry]] = []
    size = 0
    for group in _groups(entries, expert_ranks):
        added = item_bytes * sum(math.prod(shape) for entry in group for shape in entry.hf_shapes)
        if not buckets or buckets[-1][0].stage != group[0].stage or size + added > limit:
            buckets.append([])
            size = 0
        buckets[-1] += group
        size += added
    return buckets


def _groups(entries: Sequence[WeightEntry], expert_ranks: int) -> Iterator[list[WeightEntry]]:
    """Yield the entries that are sent together: one, or those of the k-th expert of every rank."""
    for is_expert, adjacent in groupby(entries, lambda entry: entry.expert is not None):
        run = list(adjacent)
        group_size = expert_ranks if is_expert else 1
        if is_expert:
            experts_per_rank = len({entry.expert for entry in run}) // expert_ranks
            # `run` has one kind of matrix after the other, each of all experts. The sort is stable, so it keeps ranks
            # in their order and the kinds apart.
            run.sort(key=lambda entry: (entry.expert or 0) % experts_per_rank)
        yield from (run[i : i + group_size] for i in range(0, len(run), group_size))


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
        checksums = torch.empty(len(names), dtype=torch.int64, device=device)
        if bucket[0].stage == grid.pp_rank:
            full = _gather(bucket, kv_heads, parameters, grid)
            torch.stack([checksum(name, x) for name, x in zip(names, full, strict=True)], out=checksums)

        if grid.pp_size > 1:
            shapes = [shape for entry in bucket for shape in entry.hf_shapes]
            if full:
                message = torch.cat([x.flatten() for x in full]).to(dtype)
            else:
                message = torch.empty(sum(map(math.prod, shapes)), dtype=dtype, device=device)
            owner = dist.get_global_rank(grid.groups.pp, bucket[0].stage)  # in this rank's own pipeline
            dist.broadcast(message, owner, group=grid.groups.pp)
            dist.broadcast(checksums, owner, group=grid.groups.pp)
            full = _split(message, shapes)

        for name, tensor, value in zip(names, full, checksums, strict=True):
            yield ChecksummedTensor(name, tensor, value)


def _gather(bucket: Sequence[WeightEntry], kv_heads: int, parameters: Mapping[str, Tensor], grid: Grid) -> list[Tensor]:
    """Return the full Hugging Face tensors of a bucket; a collective of the tensor- and expert-parallel ranks."""
    parts: dict[str, Sequence[Tensor]] = {}  # by Megatron name
    sharded = [entry for entry in bucket if entry.layout != "whole"]
    if grid.tp_size > 1 and sharded:
        gathered = _all_gather([parameters[entry.megatron] for entry in sharded], grid.groups.tp)
        parts |= zip((entry.megatron for entry in sharded), gathered, strict=True)
    experts = [entry for entry in bucket if entry.expert is not None]
    if grid.ep_size > 1 and experts:
        own_experts = experts[grid.ep_rank :: grid.ep_size]
        gathered = _all_gather([parameters[entry.megatron] for entry in own_experts], grid.groups.ep)
        parts |= zip((entry.megatron for entry in experts), ((x,) for row in gathered for x in row), strict=True)

    full: list[Tensor] = []
    for entry in bucket:
        entry_parts = parts.get(entry.megatron) or (parameters[entry.megatron].detach(),)
        full.extend(x.contiguous() for x in to_hf(entry, entry_parts, kv_heads))
    return full


def _all_gather(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[tuple[Tensor, ...]]:
    """Return for each tensor the tensors of all ranks of the group in its place, which have the same shape."""
    message = torch.cat([x.detach().flatten() for x in tensors])
    messages = [torch.empty_like(message) for _ in range(group.size())]
    dist.all_gather(messages, message, group=group)
    shapes = [tuple(x.shape) for x in tensors]
    return list(zip(*(_split(received, shapes) for received in messages), strict=True))


def _split(message: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    parts = message.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
