"""The groups of a rank on GPUs: backend, timeout, and the sockets that gloo opens for them."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_brorl.config.schema import ParallelConfig
from megatron_brorl.parallel import cpu_bridge
from megatron_brorl.parallel import grid as grids

TIMEOUT = timedelta(seconds=77)


@pytest.fixture
def build_grid(monkeypatch):
    """Build the grid of rank 0 among `size` GPUs, and return (ranks, backend, timeout) of each of its groups."""
    cpu_bridge.prepare()
    if dist.is_initialized():
        grids.leave()  # the grid of another test file
    original = dist.new_group
    groups = []

    def new_group(ranks=None, timeout=None, backend=None, **_):
        ranks = list(range(dist.get_world_size())) if ranks is None else ranks
        if 0 in ranks:
            groups.append((ranks, backend, timeout))
        return original(ranks, timeout=timeout) if 0 in ranks else dist.GroupMember.NON_GROUP_MEMBER

    def build(size, **parallel):
        monkeypatch.setenv("WORLD_SIZE", str(size))
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
        grids.build(ParallelConfig(timeout_s=TIMEOUT.total_seconds(), **parallel), phase_s=1800.0)
        return groups

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(cpu_bridge, "on_gpu", lambda: True)
    monkeypatch.setattr(grids, "model_parallel_cuda_manual_seed", lambda seed: None)
    monkeypatch.setattr(grids.Grid, "barrier", lambda self: None)
    yield build
    grids.leave()


@pytest.mark.parametrize(
    ("size", "parallel", "sockets"),
    [
        (64, {}, 128),
        (64, {"tensor": 2, "pipeline": 2, "context": 2, "expert": 2, "sequence": True}, 128),
        (512, {"tensor": 4, "pipeline": 2}, 1024),
    ],
)
def test_groups_on_gpus(build_grid, size, parallel, sockets):
    """Only the default group and the group for barriers use gloo. Each has a socket per peer and a listening socket."""
    groups = build_grid(size, **parallel)
    gloo = [(ranks, timeout) for ranks, backend, timeout in groups if backend != "nccl"]
    assert gloo == [(list(range(size)), TIMEOUT + timedelta(seconds=1800))]
    assert size + sum(len(ranks) for ranks, _ in gloo) == sockets  # size: the default group's
    assert {timeout for _, backend, timeout in groups if backend == "nccl"} == {TIMEOUT}
    # Megatron's list has None for the default group, and every group that Megatron made: all but the one for barriers.
    assert len(parallel_state._global_process_group_list) == len(groups)
