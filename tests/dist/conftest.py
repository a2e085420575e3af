"""Worlds of 1, 2 and 4 gloo processes, started at first use and anew when they have grown."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from dist.world import World


# Every group of gloo's has threads that ask for news a hundred times a second, as long as their process lives: those of
# many layouts take more of a machine than the tests do.
MOST_THREADS = 100


@pytest.fixture(scope="module")
def worlds() -> Iterator[Callable[[int], World]]:
    started: dict[int, World] = {}

    def get(size: int) -> World:
        if size in started and started[size].threads() > MOST_THREADS:
            started.pop(size).close()
        if size not in started:
            started[size] = World(size)
        return started[size]

    yield get
    for world in started.values():
        world.close()
