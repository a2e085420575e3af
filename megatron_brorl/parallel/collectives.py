"""Collectives for dicts of numbers, picklable values, and tensors of different lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_brorl.parallel import cpu_bridge

Value = TypeVar("Value")


def all_reduce(values: Mapping[str, float], op: Any, *groups: dist.ProcessGroup | None) -> dict[str, float]:
    """Reduce every value over each group in turn (None = all ranks) in float64. All ranks must pass the same keys."""
    packed = torch.tensor(list(values.values()), dtype=torch.float64, device=cpu_bridge.default_device())
    for group in groups:
        dist.all_reduce(packed, op, group=group)
    return dict(zip(values, packed.tolist(), strict=True))


def all_reduce_sum(values: Mapping[str, float], *groups: dist.ProcessGroup | None) -> dict[str, float]:
    """Sum every value over each group in turn, by default over all ranks. All ranks must pass the same keys."""
    return all_reduce(values, dist.ReduceOp.SUM, *(groups or (None,)))


def all_reduce_max(values: Mapping[str, float], *groups: dist.ProcessGroup | None) -> dict[str, float]:
    """Return the maximum of every value over each group in turn, by default over all ranks, as all_reduce_sum does."""
    return all_reduce(values, dist.ReduceOp.MAX, *(groups or (None,)))


def all_reduce_tensor(values: Tensor, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None) -> Tensor:
    """Reduce a tensor over a group (None = all ranks). Tensor and result are on the CPU."""
    reduced = values.to(cpu_bridge.default_device())
    dist.all_reduce(reduced, op, group=group)
    return reduced.cpu()


def all_gather(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """Return the picklable values of all ranks of the group (None = all ranks) in rank order."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def all_to_all(parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Send one part to each rank; return the parts for this rank in rank order, [sum of sizes] on the CPU.

    parts: one 1-D tensor per rank, all of one dtype. sizes: the length of the part from each rank.
    """
    sent = torch.cat(list(parts))
    if len(parts) == 1:
        return sent
    sent = sent.to(cpu_bridge.default_device())
    received = sent.new_empty(sum(sizes))
    dist.all_to_all_single(received, sent, list(sizes), [len(part) for part in parts])
    return received.cpu()
