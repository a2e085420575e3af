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


@pytest.mark.parametrize(("size", "sums"), [(1, [0, 1, 2]), (2, [1, 3, 5])])
def test_processes_join_again_after_they_have_left(size, sums):
    """Join and leave as several calls of megatron_brorl.train() in one process do."""
    world = World(size)
    try:
        assert world.run("stall_jobs:sums_of_grids", timeout=120) == [sums] * size
    finally:
        world.close()
