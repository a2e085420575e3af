"""From any training layout to a stream of (Hugging Face name, full tensor), the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_brorl.models.weights.layouts import to_hf
from megatron_brorl.models.weights.plan import Bucket, Place, Plan
from megatron_brorl.ops.checksum import Sealed, checksum
from megatron_brorl.parallel.grid import Grid


def stream(plan: Plan, parameters: Mapping[str, Tensor], grid: Grid, dtype: torch.dtype) -> Iterator[Sealed]:
    """Yield every full tensor [Entry.hf_shapes] once, in the order of plan.names, on every rank of the grid.

    parameters holds this rank's parts under Entry.megatron names. A collective: every rank must consume the stream to
    its end. The checksums are taken on the stage that owns a tensor, before it leaves. The tensors are views of a
    bucket, or of the parameters where nothing had to be gathered: copy what you keep.
    """
    where = next(iter(parameters.values())).device
    for bucket in plan.buckets:
        full: list[Tensor] = []
        # On the other stages this is room for what the owner sends.
        sums = torch.empty(sum(len(e.hf) for e in bucket.entries), dtype=torch.int64, device=where)
        names = [name for entry in bucket.entries for name in entry.hf]

        # The stage that owns the bucket puts it together ...
        if bucket.stage == grid.pp_rank:
            full = _gather(bucket, plan.kv_heads, parameters, grid)
            torch.stack([checksum(name, x) for name, x in zip(names, full, strict=True)], out=sums)

        # ... and sends it to the others, which make room for it.
        if grid.pipeline > 1:
            message = torch.empty(bucket.full_size, dtype=dtype, device=where)
            views = [_at(message, place) for places in bucket.full for place in places]
            for view, tensor in zip(views, full, strict=False):  # the other stages have no tensors yet
                view.copy_(tensor)
            owner = dist.get_global_rank(grid.groups.pp, bucket.stage)  # in this rank's own pipeline
            dist.broadcast(message, owner, group=grid.groups.pp)
            dist.broadcast(sums, owner, group=grid.groups.pp)
            full = views

        # What the owner summed goes along, so that whoever copies a tensor can tell damage on the way.
        for name, tensor, own in zip(names, full, sums, strict=True):
            yield Sealed(name, tensor, own)


def _gather(bucket: Bucket, kv_heads: int, parameters: Mapping[str, Tensor], grid: Grid) -> list[Tensor]:
    """The full Hugging Face tensors of a bucket, on the ranks of its stage."""
    local = [parameters[entry.megatron].detach() for entry in bucket.entries]

    # One message with all parts of a rank; replicated ones are whole already.
    messages: list[Tensor] = []
    if grid.tensor > 1 and bucket.part_size:
        mine = local[0].new_empty(bucket.part_size)
        for place, tensor in zip(bucket.parts, local, strict=True):
            if place is not None:
                _at(mine, place).copy_(tensor)
        messages = [torch.empty_like(mine) for _ in range(grid.tensor)]
        dist.all_gather(messages, mine, group=grid.groups.tp)

    full: list[Tensor] = []
    for entry, place, tensor in zip(bucket.entries, bucket.parts, local, strict=True):
        parts = [tensor] if place is None or not messages else [_at(m, place) for m in messages]
        full.extend(x.contiguous() for x in to_hf(entry, parts, kv_heads))
    return full


def _at(message: Tensor, place: Place) -> Tensor:
    return message[place.offset : place.end].view(place.shape)
