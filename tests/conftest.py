"""Settings that must precede the import of torch, and the selection of slow tests."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # Tensors are tiny, and several processes share the cores.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_brorl.config.schema import ParallelConfig
from megatron_brorl.parallel import cpu_bridge

TESTS = Path(__file__).parent
cpu_bridge.disable_compiler()
sys.path[:0] = [str(TESTS), *(str(TESTS.parent / folder) for folder in ("tools", "benchmarks"))]

_ALONE: list[Any] = []  # the grid of this process and its default group, if it has one


@pytest.fixture(scope="module")
def processes() -> Any:
    """The grid of a single process, which test files share.

    Some tests destroy it (`convert --verify`) or build another grid. The next test file then builds a new one.
    """
    import torch.distributed as dist

    from megatron_brorl.parallel import grid

    if not (_ALONE and dist.is_initialized() and dist.group.WORLD is _ALONE[1]):
        if dist.is_initialized():
            grid.leave()
        _ALONE[:] = [grid.build(ParallelConfig()), dist.group.WORLD]
    return _ALONE[0]


def pytest_unconfigure() -> None:
    """Destroy the process groups, which otherwise print warnings at exit."""
    if _ALONE:
        from megatron_brorl.parallel import grid

        grid.leave()


@pytest.hookimpl(tryfirst=True)  # before pytest applies -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests: worlds of more than two processes, whole runs that are not marked `fast`, and slow.txt.

    slow.txt lists tests that take a second or more, and ids of single cases.
    """
    slow = set((TESTS / "slow.txt").read_text(encoding="utf-8").splitlines())
    for item in items:
        world_size = item.callspec.params.get("size") if hasattr(item, "callspec") else None
        is_whole_run = item.path.is_relative_to(TESTS / "e2e") and not item.get_closest_marker("fast")
        name = f"tests/{item.nodeid.removeprefix('tests/')}"
        if is_whole_run or (world_size or 1) > 2 or not slow.isdisjoint((name, name.partition("[")[0])):
            item.add_marker("slow")
