"""Process groups over gloo: one per set of ranks, under however many names Megatron knows it.

Each has three threads, of which one wakes up a hundred times a second for as long as the process lives; Megatron asks
for some twenty, and most are over the same ranks. Over NCCL every name keeps a communicator of its own, which costs
nothing before it is used, and then goes on beside the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_brorl.parallel import cpu_bridge

# Of the present world, by their ranks; for those that this process is not in, torch's mark.
_made: dict[Any, dict[tuple[int, ...], Any]] = {}


def of_ranks(ranks: Sequence[int], timeout: timedelta) -> Any:
    """The group of these ranks, of which every rank of the world must ask; torch's NON_GROUP_MEMBER for the others.

    timeout: of its collectives, where the group is new.
    """
    if cpu_bridge.on_gpu():
        return dist.new_group(list(ranks), timeout=timeout)

    world = dist.group.WORLD
    if world not in _made:
        forget()
        _made[world] = {tuple(range(dist.get_world_size())): world}

    made, key = _made[world], tuple(sorted(ranks))
    if key not in made:
        made[key] = dist.new_group(list(key), timeout=timeout)
    return made[key]


def forget() -> None:
    """Of a world that this process leaves."""
    _made.clear()


@contextlib.contextmanager
def one_per_ranks(timeout: timedelta) -> Iterator[None]:
    """While Megatron makes its groups, which it does by a function of its own; on GPUs it makes them as ever."""

    def create(ranks: Sequence[int], **_: Any) -> Any:
        return of_ranks(ranks, timeout)

    own = parallel_state.create_group
    if not cpu_bridge.on_gpu():
        parallel_state.create_group = create
    try:
        yield
    finally:
        parallel_state.create_group = own
