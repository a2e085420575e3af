"""Conversion between one Megatron parameter, split over tensor-parallel ranks, and its Hugging Face tensors.

A parameter is split along one dimension of a view in which every rank's part is contiguous:

    layout       full view                          split dim   Hugging Face tensors
    whole        as is                              -           1 or more, concatenated
    rows         [out, in]                          0           1   (column-parallel linear)
    columns      [out, in]                          1           1   (row-parallel linear)
    vocab        [V padded to tp, H]                0           1   (the padding is dropped)
    qkv          [kv heads, (q per kv + 2) * d, H]  0           3   (q, k, v; one query group after another)
    gate_up      [2, ffn, H]                        1           2   (gate, up)

A "whole" parameter is the same on all tensor-parallel ranks. The parameters of an expert are only on its own ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_brorl.families.family import Layout

if TYPE_CHECKING:  # Importing Megatron takes seconds, which a conversion does not need.
    from megatron_brorl.parallel.grid import Grid

_SPLIT_DIM = {"rows": 0, "columns": 1, "vocab": 0, "qkv": 0, "gate_up": 1}


@dataclass(frozen=True)
class WeightEntry:
    """One parameter with its Megatron and Hugging Face names."""

    megatron: str  # with the global indices of layer and expert
    hf: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]
    layout: Layout
    stage: int  # pipeline stage that owns it
    expert: int | None = None  # global index, for the parameter of an expert

    def is_on(self, grid: Grid, experts: int) -> bool:
        """Return whether this rank has the parameter or a part of it. experts: number of experts per layer."""
        has_expert = self.expert is None or self.expert * grid.ep_size // experts == grid.ep_rank
        return has_expert and self.stage == grid.pp_rank


def local_shape(entry: WeightEntry, size: int) -> tuple[int, ...]:
    """Return the shape of one rank's part of an entry that is split over `size` tensor-parallel ranks."""
    first, *rest = entry.hf_shapes[0]
    if entry.layout == "vocab":
        return (-(-first // size), *rest)  # rounded up, with padding on the last ranks
    if entry.layout == "columns":
        return (first, rest[0] // size)
    rows = sum(shape[0] for shape in entry.hf_shapes)
    return (rows if entry.layout == "whole" else rows // size, *rest)


def _view(layout: Layout, tensor: Tensor, kv_heads: int) -> Tensor:
    """Return the view that is split; also valid for one rank's part, with that rank's kv_heads."""
    if layout == "qkv":
        return tensor.reshape(kv_heads, -1, *tensor.shape[1:])
    if layout == "gate_up":
        return tensor.reshape(2, -1, *tensor.shape[1:])
    return tensor


def to_local(entry: WeightEntry, hf: Sequence[Tensor], kv_heads: int, rank: int, size: int) -> Tensor:
    """Return the part [local_shape] of rank `rank` of `size`, from full Hugging Face tensors [hf_shapes]."""
    if entry.layout == "whole":
        return torch.cat(list(hf)) if len(hf) > 1 else hf[0]
    if entry.layout == "vocab":
        rows = -(-len(hf[0]) // size)
        part = hf[0][rank * rows : (rank + 1) * rows]
        padding = rows - len(part)
        return torch.cat((part, part.new_zeros(padding, *part.shape[1:]))) if padding else part
    if entry.layout == "qkv":
        return torch.cat([_view("qkv", x, kv_heads).chunk(size)[rank] for x in hf], dim=1).flatten(0, 1)
    if entry.layout == "gate_up":
        return torch.cat([x.chunk(size)[rank] for x in hf])
    return hf[0].chunk(size, dim=_SPLIT_DIM[entry.layout])[rank]


def to_hf(entry: WeightEntry, parts: Sequence[Tensor], kv_heads: int) -> list[Tensor]:
    """Return the full, contiguous Hugging Face tensors [hf_shapes] of the parts [local_shape] of all ranks, in order.

    They share memory with a part if nothing had to be merged.
    """
    if entry.layout == "whole":
        return list(parts[0].split([shape[0] for shape in entry.hf_shapes]))
    views = [_view(entry.layout, p, kv_heads // len(parts)) for p in parts]
    full = torch.cat(views, dim=_SPLIT_DIM[entry.layout]) if len(views) > 1 else views[0]
    if entry.layout == "vocab":
        return [full[: entry.hf_shapes[0][0]].contiguous()]
    if entry.layout == "gate_up":
        return [x.contiguous() for x in full]
    if entry.layout == "qkv":
        rows = [shape[0] // kv_heads for shape in entry.hf_shapes]
        return [x.reshape(s) for x, s in zip(full.split(rows, dim=1), entry.hf_shapes, strict=True)]
    return [full]
