"""A stalled run names the ranks that the others wait for."""

from __future__ import annotations

import re

import pytest
from dist.world import World


@pytest.mark.parametrize(("writes", "place"), [(True, "score"), (False, "no report")])
def test_rank_0_names_the_rank_that_is_behind(worlds, writes, place):
    """Rank 1 waits in an earlier span, with a reporter of its own or without one, as if it were dead."""
    line, other = worlds(2).run("stall_jobs:wait_for_rank_1", writes)
    assert re.findall(r"rank ([\d, ]+) \((.*?)[:)]", line) == [("1", place)]
    assert "'update'" in line  # where rank 0 waits
    assert other == ""


@pytest.mark.parametrize("size", [1, 2])
def test_processes_join_again_after_they_have_left(size):
    """Join and leave twice, as two calls of megatron_brorl.train() in one process do.

    The sum of rank + i over n ranks is n (n - 1) / 2 + i n.
    """
    world = World(size)
    try:
        expected = [size * (size - 1) // 2 + size * i for i in range(3)]
        assert world.run("stall_jobs:sums_of_grids", timeout=120) == [expected] * size
    finally:
        world.close()
