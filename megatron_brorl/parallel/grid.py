"""The process grid: data x pipeline x context x tensor, and its groups, handed to whoever needs them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
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

_NAMING = timedelta(seconds=5)  # between the ranks that notice a failed collective


@dataclass(frozen=True)
class Grid:
    """Where this process stands. Ranks vary fastest over tensor, then context, data, pipeline (Megatron's order)."""

    tensor: int
    pipeline: int
    data: int
    tp_rank: int
    pp_rank: int
    dp_rank: int
    groups: ProcessGroupCollection  # .tp .pp .cp .dp .dp_cp (data x context) ...
    replica: dist.ProcessGroup  # the tensor x context x pipeline ranks that train on the same rows
    context: int = 1
    sequence_parallel: bool = False
    meeting: dist.ProcessGroup | None = None  # all ranks, over gloo
    patience: timedelta = timedelta()

    @property
    def rank(self) -> int:
        """Of this process, among all."""
        return dist.get_rank()

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.mp_size * self.data

    @property
    def first_stage(self) -> bool:
        """Whether this rank holds the embedding, at the front of the pipeline."""
        return self.pp_rank == 0

    @property
    def last_stage(self) -> bool:
        """Whether this rank holds the head, at the end of the pipeline."""
        return self.pp_rank == self.pipeline - 1

    @property
    def mp_size(self) -> int:
        """Ranks of `replica`."""
        return self.tensor * self.context * self.pipeline

    @property
    def replicas(self) -> list[list[int]]:
        """The ranks of every replica."""
        return _replicas(self.tensor * self.context, self.pipeline, self.data)

    def line(self) -> str:
        """The layout for people."""
        parts = {"tensor": self.tensor, "context": self.context, "pipeline": self.pipeline}
        cut = " x ".join(f"{name} {size}" for name, size in parts.items() if size > 1)
        return f"{self.world}: {self.data} cop{'y' if self.data == 1 else 'ies'} of the model" + f", {cut}" * bool(cut)

    def barrier(self, patience: timedelta | None = None) -> None:
        """Wait for all ranks after a phase in which they may be further apart than parallel.timeout_s allows.

        Raises RuntimeError, on rank 0 with the ranks that are missing, when the given or the grid's patience is over.
        """
        if self.meeting is not None:
            dist.monitored_barrier(self.meeting, patience or self.patience, wait_all_ranks=True)

    def name_missing(self, error: BaseException) -> None:
        """Raise RuntimeError with the ranks that are missing, on rank 0, if a collective failed with this error.

        Gloo and NCCL do not say for whom a collective waited.
        """
        if network.lost_peer(error) and "monitoredBarrier" not in str(error):
            self.barrier(_NAMING)


def build(config: ParallelConfig, seed: int = 0, phase_s: float = 0.0) -> Grid:
    """Join the processes of the launcher (torchrun, Slurm; alone without one) into a grid.

    phase_s: seconds that ranks may be apart at a `barrier`, beside parallel.timeout_s; 0 = they never do.
    Raises UserError when the world size is not a multiple of tensor x context x pipeline.
    """
    # The launcher's processes must fill whole replicas of the model.
    cpu_bridge.prepare()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    model = config.tensor * config.context * config.pipeline  # ranks that hold one copy of the model

    # Said here in the configuration's words, before Megatron says it in its own.
    if world % model:
        # Context parallelism is named only where it is in use.
        axes = ["tensor", "pipeline", *(["context"] if config.context > 1 else [])]
        names, sizes = " x ".join(f"parallel.{a}" for a in axes), " x ".join(str(getattr(config, a)) for a in axes)
        raise UserError(
            f"world size {world} is not a multiple of {names} = {sizes}: start {model} processes, or a multiple "
            "(torchrun --nproc-per-node)"
        )

    # Join them, and let Megatron make its groups.
    timeout = timedelta(seconds=config.timeout_s)
    if not dist.is_initialized():
        _join(world, timeout)
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()  # of an earlier grid in this process
    with _one_group_per_ranks(timeout):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor,
            pipeline_model_parallel_size=config.pipeline,
            context_parallel_size=config.context,
            create_gloo_process_groups=False,  # for checkpoints in a form that is not ours
        )

    # Handed on by name from here: no other file of ours asks Megatron's globals for a group.
    of_megatron = ProcessGroupCollection.use_mpu_process_groups()
    # Dropout is off everywhere; Megatron still insists on seeded generators for its forks.
    model_parallel_cuda_manual_seed(seed)

    # A phase may keep ranks apart for its own length, and messages take their time after it.
    patience = timedelta(seconds=phase_s) + timeout  # at a barrier
    grid = Grid(
        tensor=config.tensor,
        pipeline=config.pipeline,
        data=world // model,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        groups=of_megatron,
        # Megatron has this group where there is no context parallelism.
        replica=of_megatron.mp if config.context == 1 else _replica(config, world // model, timeout),
        context=config.context,
        sequence_parallel=config.sequence,
        # Over gloo: NCCL has no barrier that names who is missing.
        meeting=dist.new_group(timeout=patience, backend="gloo") if phase_s and world > 1 else None,
        patience=patience,
    )

    # Rank 0 has the store: a mistake that ends it next must find nobody still making a group through it.
    grid.barrier()
    return grid


def _replica(config: ParallelConfig, data: int, timeout: timedelta) -> dist.ProcessGroup:
    """Megatron has no group of tensor x context x pipeline ranks."""
    every = _replicas(config.tensor * config.context, config.pipeline, data)
    made = {dist.get_rank() in ranks: _group_of(ranks, timeout) for ranks in every}
    return made[True]


def _replicas(near: int, pipeline: int, data: int) -> list[list[int]]:
    """Ranks by replica in Megatron's order; near: ranks of one of its stages."""
    return [[p * data * near + d * near + i for p in range(pipeline) for i in range(near)] for d in range(data)]


def _join(world: int, timeout: timedelta) -> None:
    if cpu_bridge.on_gpu():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if cpu_bridge.on_gpu() else "gloo"
    rank, store = int(os.environ.get("RANK", "0")), network.store(world, timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def leave() -> None:
    """Tear the groups down at the end of a command, so that no rank is left waiting."""
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    _groups.clear()


# The groups of a world by their ranks. A gloo group has three threads, and Megatron asks for about twenty groups, most
# of them of the same ranks, so equal groups are shared. NCCL groups are not shared, because they may run concurrently.
_groups: dict[Any, dict[tuple[int, ...], Any]] = {}


def _group_of(ranks: Sequence[int], timeout: timedelta) -> Any:
    """Return the process group of these ranks; NON_GROUP_MEMBER on other ranks. A collective of the world."""
    if cpu_bridge.on_gpu():
        return dist.new_group(list(ranks), timeout=timeout)

    world = dist.group.WORLD
    if world not in _groups:
        _groups.clear()
        _groups[world] = {tuple(range(dist.get_world_size())): world}
    groups = _groups[world]
    key = tuple(sorted(ranks))
    if key not in groups:
        groups[key] = dist.new_group(list(key), timeout=timeout)
    return groups[key]


@contextlib.contextmanager
def _one_group_per_ranks(timeout: timedelta) -> Iterator[None]:
    """Let Megatron's function for new groups share gloo groups; NCCL groups are made as before."""

    def create(ranks: Sequence[int], **_: Any) -> Any:
        return _group_of(ranks, timeout)

    own = parallel_state.create_group
    if not cpu_bridge.on_gpu():
        parallel_state.create_group = create
    try:
        yield
    finally:
        parallel_state.create_group = own
