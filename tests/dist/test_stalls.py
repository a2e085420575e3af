"""A stalled run names the ranks that the others wait for, and processes can join again."""

from __future__ import annotations

import queue
import re

import pytest
import torch
import torch.distributed as dist
from dist.jobs import grid_of
from dist.world import World

from megatron_brorl.config.schema import ParallelConfig
from megatron_brorl.parallel import grid as grids
from megatron_brorl.parallel import network
from megatron_brorl.parallel.network import StallReporter
from megatron_brorl.tracking.timeline import span


def wait_for_rank_1(rank: int, has_reporter: bool) -> str:
    """Return the report of rank 0, which waits for rank 1. Rank 1 waits for it. has_reporter: rank 1 reports, too."""
    grid_of()
    lines: queue.Queue[str] = queue.Queue()
    store = network.shared_store()
    reporter = StallReporter(timeout_s=1.0, report=lines.put)
    dist.barrier()
    if rank == 0 or has_reporter:
        reporter.start()
    with span("score"):
        if rank == 1:
            store.wait([f"reported/{has_reporter}"])  # This wait locks the process's connection to the store.
        elif has_reporter:
            store.wait(["stalls/1"])
    with span("update"):
        line = lines.get() if rank == 0 else ""
        store.set(f"reported/{has_reporter}", "")
        dist.all_reduce(torch.zeros(1))
    reporter.stop()
    dist.barrier()
    store.delete_key(f"stalls/{rank}")
    return line if rank == 0 else "".join(lines.queue)


@pytest.mark.parametrize(("has_reporter", "place"), [(True, "score"), (False, "no report")])
def test_rank_0_names_the_rank_that_is_behind(worlds, has_reporter, place):
    """Rank 1 waits in an earlier span, with a reporter of its own or without one, as if it were dead."""
    line, other = worlds(2).run("test_stalls:wait_for_rank_1", has_reporter)
    assert re.findall(r"rank ([\d, ]+) \((.*?)[:)]", line) == [("1", place)]
    assert "'update'" in line  # where rank 0 waits
    assert other == ""


def sums_of_grids(rank: int) -> list[int]:
    """Return the sum of (rank + i) over the ranks from each of three grids, one after another."""
    values = torch.arange(rank, rank + 3).split(1)
    for i, value in enumerate(values):
        grid = grids.build(ParallelConfig(timeout_s=60 + i), phase_s=5.0)
        dist.all_reduce(value)
        grid.barrier()
        grids.leave()
    return [int(value) for value in values]


@pytest.mark.parametrize(("size", "sums"), [(1, [0, 1, 2]), (2, [1, 3, 5])])
def test_processes_join_again_after_they_have_left(size, sums):
    """Join and leave as several calls of megatron_brorl.train() in one process do."""
    world = World(size)
    try:
        assert world.run("test_stalls:sums_of_grids", timeout=120) == [sums] * size
    finally:
        world.close()
