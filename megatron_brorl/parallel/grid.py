"""The process grid, data x pipeline x context x tensor, with its process groups."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_brorl.config.schema import ParallelConfig
from megatron_brorl.errors import UserError
from megatron_brorl.parallel import cpu_bridge, network

_FAILED_BARRIER_TIMEOUT = timedelta(seconds=5)  # all remaining ranks notice a failed collective in this time


@dataclass(frozen=True)
class Grid:
    """The sizes of the grid, and the position of this process in it.

    Consecutive ranks differ first in their tensor rank, then in the context, data and pipeline rank, as in Megatron.
    """

    tp_size: int
    pp_size: int
    dp_size: int
    tp_rank: int
    pp_rank: int
    dp_rank: int
    groups: ProcessGroupCollection  # .tp .pp .cp .dp .dp_cp (data x context) ...
    replica: dist.ProcessGroup  # the tp_size x cp_size x pp_size ranks that train on the same rows
    cp_size: int = 1
    ep_size: int = 1  # ranks of a pipeline stage over which its experts are distributed
    sequence_parallel: bool = False
    barrier_group: dist.ProcessGroup | None = None  # all ranks, over gloo
    barrier_timeout: timedelta = timedelta()

    @property
    def rank(self) -> int:
        """Rank of this process among all."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.mp_size * self.dp_size

    @property
    def last_stage(self) -> bool:
        """True if this rank has the LM head."""
        return self.pp_rank == self.pp_size - 1

    @property
    def ep_rank(self) -> int:
        """Position of this process in its expert group, groups.ep."""
        return self.groups.ep.rank() if self.ep_size > 1 else 0

    @property
    def mp_size(self) -> int:
        """Number of ranks of a replica."""
        return self.tp_size * self.cp_size * self.pp_size

    @property
    def replicas(self) -> list[list[int]]:
        """The ranks of every replica."""
        return _replicas(self.tp_size * self.cp_size, self.pp_size, self.dp_size)

    def describe(self) -> str:
        """Return a description of the layout for the user."""
        sizes = {"tensor": self.tp_size, "context": self.cp_size, "pipeline": self.pp_size, "expert": self.ep_size}
        split = "".join(f", {name} {size}" for name, size in sizes.items() if size > 1)
        return f"{self.world_size}: {self.dp_size} cop{'y' if self.dp_size == 1 else 'ies'} of the model{split}"

    def barrier(self, timeout: timedelta | None = None) -> None:
        """Wait for all ranks after a phase that may take them longer than parallel.timeout_s.

        timeout: replaces barrier_timeout. After it, raises RuntimeError, which names the missing ranks on rank 0.
        """
        if self.barrier_group is not None:
            dist.monitored_barrier(self.barrier_group, timeout or self.barrier_timeout, wait_all_ranks=True)

    def name_missing(self, error: BaseException) -> None:
        """If a collective failed with this error, raise RuntimeError on rank 0 with the missing ranks.

        The errors of gloo and NCCL do not name these ranks.
        """
        if network.lost_peer(error) and "monitoredBarrier" not in str(error):
            self.barrier(_FAILED_BARRIER_TIMEOUT)


def check_ranks(config: ParallelConfig, world: int) -> None:
    """Raise UserError if `world` ranks cannot form a grid.

    They must be a multiple of tensor x context x pipeline, and the ranks of a pipeline stage a multiple of expert.
    """
    replica_size = config.tensor * config.context * config.pipeline
    if world % replica_size:
        axes = ["tensor", "pipeline", *(["context"] if config.context > 1 else [])]
        names = " x ".join(f"parallel.{a}" for a in axes)
        sizes = " x ".join(str(getattr(config, a)) for a in axes)
        raise UserError(
            f"world size {world} is not a multiple of {names} = {sizes}: start {replica_size} processes, or a multiple "
            "(--processes, or torchrun --nproc-per-node)"
        )
    stage_ranks = world // config.pipeline
    if stage_ranks % config.expert:
        raise UserError(
            f"parallel.expert = {config.expert} does not divide the {stage_ranks} ranks of a pipeline stage (data x "
            "context x tensor): choose a divisor, or start more processes"
        )


def build(config: ParallelConfig, seed: int = 0, phase_s: float = 0.0) -> Grid:
    """Join the processes of the launcher (torchrun, Slurm, or a single process) into a grid.

    phase_s: seconds that `barrier` waits in addition to parallel.timeout_s; if 0, `barrier` does nothing. Raises
    UserError as `check_ranks` does.
    """
    cpu_bridge.prepare()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    check_ranks(config, world)
    dp_size = world // (config.tensor * config.context * config.pipeline)
    timeout = timedelta(seconds=config.timeout_s)
    if not dist.is_initialized():
        if cpu_bridge.on_gpu():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl" if cpu_bridge.on_gpu() else "gloo"
        rank = int(os.environ.get("RANK", "0"))
        store = network.store(world, timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()  # of an earlier grid in this process
    with _own_groups(timeout):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor,
            pipeline_model_parallel_size=config.pipeline,
            context_parallel_size=config.context,
            expert_model_parallel_size=config.expert,
            expert_tensor_parallel_size=1 if config.expert > 1 else None,  # An expert is not split.
            create_gloo_process_groups=False,  # Megatron's own checkpoints would need them
        )
        groups = ProcessGroupCollection.use_mpu_process_groups()
        replica = groups.mp if config.context == 1 else _replica(config, dp_size)
    # Dropout is off everywhere, but Megatron requires seeded generators.
    model_parallel_cuda_manual_seed(seed)

    barrier_timeout = timedelta(seconds=phase_s) + timeout
    grid = Grid(
        tp_size=config.tensor,
        pp_size=config.pipeline,
        dp_size=dp_size,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        groups=groups,
        replica=replica,
        cp_size=config.context,
        ep_size=config.expert,
        sequence_parallel=config.sequence,
        # NCCL has no barrier that names the missing ranks.
        barrier_group=dist.new_group(timeout=barrier_timeout, backend="gloo") if phase_s and world > 1 else None,
        barrier_timeout=barrier_timeout,
    )

    # Rank 0 has the store. If it ended now, other ranks could still be making groups through the store.
    grid.barrier()
    return grid


def _replica(config: ParallelConfig, dp_size: int) -> dist.ProcessGroup:
    """Return the group of this rank's replica, which Megatron has only without context parallelism."""
    replicas = _replicas(config.tensor * config.context, config.pipeline, dp_size)
    # Creating a group is a collective of all ranks.
    groups = [parallel_state.create_group(ranks) for ranks in replicas]
    return next(group for ranks, group in zip(replicas, groups, strict=True) if dist.get_rank() in ranks)


def _replicas(stage_size: int, pp_size: int, dp_size: int) -> list[list[int]]:
    """Return the ranks of each replica in Megatron's order. stage_size: ranks of a replica's pipeline stage."""
    return [
        [(p * dp_size + d) * stage_size + i for p in range(pp_size) for i in range(stage_size)] for d in range(dp_size)
    ]


def leave() -> None:
    """Destroy all process groups, so that no rank waits for another one."""
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    _gloo_group.cache_clear()


@functools.cache
def _gloo_group(ranks: tuple[int, ...], timeout: timedelta) -> Any:
    """Return one group for all requests of the same ranks. A group has three threads, and Megatron makes about twenty.

    NCCL groups are not shared, because they may run concurrently.
    """
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    return dist.new_group(list(ranks), timeout=timeout)


@contextlib.contextmanager
def _own_groups(timeout: timedelta) -> Iterator[None]:
    """Set backend and timeout of the groups that Megatron makes, and share gloo groups.

    On a GPU, they would inherit gloo from the default group, and gloo connects all pairs of ranks of each group.
    Megatron's timeout is 30 minutes.
    """
    create = parallel_state.create_group

    def nccl_group(ranks: list[int], **options: Any) -> Any:
        return create(ranks, **{**options, "backend": "nccl", "timeout": timeout})

    def gloo_group(ranks: list[int], **_: Any) -> Any:
        return _gloo_group(tuple(sorted(ranks)), timeout)

    parallel_state.create_group = nccl_group if cpu_bridge.on_gpu() else gloo_group
    try:
        yield
    finally:
        parallel_state.create_group = create
