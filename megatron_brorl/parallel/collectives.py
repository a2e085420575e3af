"""Numbers over ranks: a few by name in one message, or a list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_brorl.parallel import cpu_bridge


def all_reduce(values: Mapping[str, float], op: Any, *groups: dist.ProcessGroup | None) -> dict[str, float]:
    """Reduce every value over each group in turn (None = all ranks) in float64; every rank must name the same keys."""
    packed = torch.tensor(list(values.values()), dtype=torch.float64, device=cpu_bridge.default_device())
    for group in groups:
        dist.all_reduce(packed, op, group=group)
    return dict(zip(values, packed.tolist(), strict=True))


def all_gather(values: Sequence[float], group: dist.ProcessGroup | None) -> list[list[float]]:
    """The numbers of every rank of the group in rank order, in float64; as many on every rank."""
    own = torch.tensor(values, dtype=torch.float64, device=cpu_bridge.default_device())
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    return [part.tolist() for part in found]


def all_reduce_sum(values: Mapping[str, float], *groups: dist.ProcessGroup | None) -> dict[str, float]:
    """Sum every value over each group in turn, all ranks where none is given; the same keys on every rank."""
    return all_reduce(values, dist.ReduceOp.SUM, *(groups or (None,)))


def all_reduce_max(values: Mapping[str, float], *groups: dist.ProcessGroup | None) -> dict[str, float]:
    """The largest of every value over each group in turn, all ranks where none is given; the same keys everywhere."""
    return all_reduce(values, dist.ReduceOp.MAX, *(groups or (None,)))


def all_to_all(parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """What all ranks have for this one, in rank order, on the CPU: [sum of sizes].

    parts: what this rank has for each, [any] of one type; sizes: how much comes from each, which the caller knows.
    """
    sent = torch.cat(list(parts))
    if len(parts) == 1:
        return sent
    sent = sent.to(cpu_bridge.default_device())
    received = sent.new_empty(sum(sizes))
    dist.all_to_all_single(received, sent, list(sizes), [len(part) for part in parts])
    return received.cpu()


def all_gather_ids(values: Tensor) -> Tensor:
    """The values [K] int64 of all ranks, in rank order; K may differ."""
    where = cpu_bridge.default_device()
    lengths = [torch.zeros(1, dtype=torch.int64, device=where) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(values)], device=where))

    # Messages are of one length: the longest.
    most = int(torch.cat(lengths).max())
    padded = torch.zeros(most, dtype=torch.int64, device=where)
    padded[: len(values)] = values.to(where)

    parts = [torch.empty_like(padded) for _ in lengths]
    if most:
        dist.all_gather(parts, padded)
    return torch.cat([part[: int(n)] for part, n in zip(parts, lengths, strict=True)]).cpu()


def all_gather_text(line: str) -> list[str]:
    """The lines of text of all ranks, in rank order; blanks at the front of one are dropped."""
    own = line.encode() + b"\n"
    own = own.rjust(-(-len(own) // 8) * 8)  # whole numbers of 8 bytes
    found = all_gather_ids(torch.frombuffer(bytearray(own), dtype=torch.int64))
    return [text.lstrip() for text in found.numpy().tobytes().decode().split("\n")[:-1]]
