"""From any training layout to a stream of (Hugging Face name, full tensor), the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_brorl.parallel.grid import Grid
from megatron_brorl.reshard.layout import Entry, to_hf


def stream(
    entries: Sequence[Entry], parameters: Mapping[str, Tensor], kv_heads: int, grid: Grid, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield every full tensor once, in the order of `entries`, on every rank of the grid.

    parameters holds this rank's parts under Entry.megatron names. A collective: every rank must consume the stream to
    its end. The tensors are fresh, or views of the parameters where nothing had to be gathered: copy what you keep.
    """
    for entry in entries:
        full: list[Tensor] | None = None
        if entry.stage == grid.pp_rank:
            local = parameters[entry.megatron].detach()
            parts = [local]
            if grid.tensor > 1 and entry.layout != "replicated":
                parts = [torch.empty_like(local) for _ in range(grid.tensor)]
                dist.all_gather(parts, local.contiguous(), group=grid.groups.tp)
            full = [x.contiguous() for x in to_hf(entry, parts, kv_heads)]
        if grid.pipeline > 1:
            owner = dist.get_global_rank(grid.groups.pp, entry.stage)
            where = next(iter(parameters.values())).device
            if full is None:
                full = [torch.empty(shape, dtype=dtype, device=where) for shape in entry.hf_shapes]
            for tensor in full:
                dist.broadcast(tensor, owner, group=grid.groups.pp)
        assert full is not None
        yield from zip(entry.hf, full, strict=True)
