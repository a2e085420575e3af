"""Megatron's groups over gloo have the right ranks, and groups of the same ranks are shared."""

from __future__ import annotations

from math import prod

import pytest

from megatron_brorl.parallel import cpu_bridge

LAYOUTS = [(1, {}), (2, {"tensor": 2}), (4, {"pipeline": 2}), (4, {"context": 2, "tensor": 2})]


def neighbours(rank: int, size: int, parallel: dict[str, int], axes: tuple[str, ...]) -> list[int]:
    """Return the ranks that differ in these axes only; ranks vary fastest over tensor, then context, data."""
    sizes = {"tensor": 1, "context": 1, "data": size // prod(parallel.values()), "pipeline": 1} | parallel
    order = ("tensor", "context", "data", "pipeline")

    def place(r: int) -> dict[str, int]:
        coordinates = {}
        for axis in order:
            coordinates[axis] = r % sizes[axis]
            r = r // sizes[axis]
        return coordinates

    return [r for r in range(size) if all(place(r)[a] == place(rank)[a] for a in order if a not in axes)]


@pytest.mark.parametrize(("size", "parallel"), LAYOUTS)
def test_groups_have_their_ranks_and_are_shared(worlds, size, parallel):
    axes_of = {
        "tp": ("tensor",),
        "pp": ("pipeline",),
        "cp": ("context",),
        "dp": ("data",),
        "dp_cp": ("data", "context"),
        "mp": ("tensor", "pipeline"),
        "replica": ("tensor", "context", "pipeline"),
    }
    expected = [{name: neighbours(r, size, parallel, axes) for name, axes in axes_of.items()} for r in range(size)]
    for rank, (ranks, sums, same) in enumerate(worlds(size).run("jobs:groups", parallel, list(axes_of))):
        assert ranks == expected[rank]
        assert sums == {name: sum(10.0**r for r in members) for name, members in ranks.items()}  # a digit per rank
        if not cpu_bridge.on_gpu():
            assert same == [(a, b) for a in axes_of for b in axes_of if ranks[a] == ranks[b]]
