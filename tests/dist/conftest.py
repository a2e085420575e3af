"""Worlds of 1, 2 and 4 gloo processes, started at first use."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import tiny
from dist.world import World


@pytest.fixture(scope="module")
def worlds() -> Iterator[Callable[[int], World]]:
    started: dict[int, World] = {}

    def get(size: int) -> World:
        if size not in started:
            started[size] = World(size)
        return started[size]

    yield get
    for world in started.values():
        world.close()


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with tied embeddings, which tests do not change."""
    path = tmp_path_factory.mktemp("model")
    tiny.make_model(path, "qwen2", tied=True)
    return str(path)


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny mixture of experts, which tests do not change."""
    path = tmp_path_factory.mktemp("experts")
    tiny.make_model(path, "qwen3_moe", tied=False)
    return str(path)
