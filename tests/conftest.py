"""What every test process needs before torch is imported, and which tests `make test-fast` leaves out."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors; several processes share the cores
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_brorl.config.schema import ParallelConfig
from megatron_brorl.parallel import cpu_bridge

TESTS = Path(__file__).parent
cpu_bridge.leave_out_compiler()
sys.path[:0] = [str(TESTS), str(TESTS.parent / "tools")]


_ALONE: list[Any] = []  # the grid of this process, where there is one


@pytest.fixture(scope="module")
def processes() -> Any:
    """The grid of a single process, one for many files.

    Some tests leave it, with what they try (`convert --verify`); the next file has a new one.
    """
    import torch.distributed as dist

    from megatron_brorl.parallel import grid

    if not (_ALONE and dist.is_initialized()):
        _ALONE[:] = [grid.build(ParallelConfig())]
    return _ALONE[0]


def pytest_unconfigure() -> None:
    """Leave it, so that no group complains at the end."""
    if _ALONE:
        from megatron_brorl.parallel import grid

        grid.leave()


@pytest.hookimpl(tryfirst=True)  # before -m chooses among them
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Worlds of more than two processes and whole runs are slow, but for the one that is marked `fast`.

    So are the cases of slow.txt, which took a second or more (a list, because most are some cases of many).
    """
    slow = set((TESTS / "slow.txt").read_text(encoding="utf-8").splitlines())
    for item in items:
        size = getattr(item, "callspec", None) and item.callspec.params.get("size", 1)
        whole = item.path.is_relative_to(TESTS / "e2e") and not item.get_closest_marker("fast")
        if whole or (size or 1) > 2 or f"tests/{item.nodeid.removeprefix('tests/')}" in slow:
            item.add_marker("slow")
