"""Functions that the processes of test_weight_sync_of_layouts.py run; see jobs.py."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from typing import Any

import torch
import torch.distributed as dist
from dist.jobs import grid_of, make_worker, rows
from megatron.core import dist_checkpointing
from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService
from megatron.core.resharding.refit import swap_model_weights
from safetensors.torch import load_file

from megatron_brorl.config.schema import Config, TrainConfig
from megatron_brorl.errors import UserError
from megatron_brorl.models.weights.names import hf_shapes
from megatron_brorl.models.weights.stream import make_buckets
from megatron_brorl.ops.backend import backend
from megatron_brorl.ops.checksum import ChecksummedTensor
from megatron_brorl.ops.reference.sampling import sample_tokens
from megatron_brorl.parallel import cpu_bridge
from megatron_brorl.rollout.native.torch_engine import TorchEngine
from megatron_brorl.rollout.watchdog import Watchdog
from megatron_brorl.rollout.weight_stream import UpdateRefused, receive
from megatron_brorl.train.weight_sync import sync_weights, verify_weights
from megatron_brorl.train.worker import StageOptions, Worker

OPTIONS = StageOptions(100, backend("fused", torch.device("cpu")))


class Engine:
    """Keeps the tensors that it receives, by name. fault: the damage to the next `faults_left` streams."""

    def __init__(self, worker: Worker) -> None:
        self.names = hf_shapes(worker.shape)
        self.held: dict[str, torch.Tensor] = {}
        self.version = -1
        self.fault = ""
        self.faults_left = 0

    def update_weights(self, tensors: Any, version: int) -> None:
        if self.faults_left:
            self.faults_left -= 1
            tensors = FAULTS[self.fault](tensors)
        self.held = receive(tensors, self.names, torch.device("cpu"), torch.float32)
        self.version = version


def _drop(tensors: Any) -> Any:
    for i, pair in enumerate(tensors):
        if not 5 <= i < 12:
            yield pair


def _swap(tensors: Any) -> Any:
    held = None
    for pair in tensors:
        if pair[0] == "model.layers.2.self_attn.k_proj.weight":
            held = ChecksummedTensor(pair[0], pair[1].clone(), pair.checksum)
        elif held is not None and pair[0] == "model.layers.2.self_attn.v_proj.weight":
            yield ChecksummedTensor(held[0], pair[1], pair.checksum)
            yield ChecksummedTensor(pair[0], held[1], held.checksum)
        else:
            yield pair


def _flip(tensors: Any) -> Any:
    for pair in tensors:
        name, tensor = pair
        if name == "model.layers.3.mlp.down_proj.weight":
            tensor = tensor.clone()
            tensor.view(torch.uint8).view(-1)[1234] ^= 64
        yield ChecksummedTensor(name, tensor, pair.checksum)


def _stop(tensors: Any) -> Any:
    for i, pair in enumerate(tensors):
        yield pair
        if i == 7:
            for _ in tensors:  # the other ranks take part in the rest
                pass
            raise RuntimeError("engine killed")


def _die(tensors: Any) -> Any:
    for i, pair in enumerate(tensors):
        yield pair
        if i == 7:
            os._exit(9)


FAULTS = {"drop": _drop, "swap": _swap, "flip": _flip, "stop": _stop, "die": _die}


def _small_buckets(worker: Worker) -> None:
    """Use several buckets per stage for a model of a few kilobytes."""
    table = [entry for bucket in worker.buckets for entry in bucket]
    worker.buckets = make_buckets(table, 4, limit=30_000, expert_ranks=worker.grid.ep_size)
    assert len(worker.buckets) > 4


def syncs(_rank: int, directories: list[str], parallel: dict[str, Any]) -> list[str]:
    """Sync the weights of each directory; return the names of tensors that did not arrive bit by bit."""
    worker = make_worker(directories[0], parallel)
    _small_buckets(worker)
    engine = Engine(worker)
    wrong = []
    for version, directory in enumerate(directories):
        worker.load_hf(directory)
        assert sync_weights(worker, engine, version) == 0
        assert engine.version == version
        expected = load_file(os.path.join(directory, "model.safetensors"))
        expected = {name: expected[name] for name in engine.names}
        assert engine.held.keys() == expected.keys()
        wrong += [f"{version}: {n}" for n, x in expected.items() if not torch.equal(engine.held[n], x)]
    return wrong


def faulty(rank: int, directory: str, parallel: dict[str, Any], fault: str, where: int, tries: int) -> dict[str, Any]:
    """Damage `tries` updates in a row on the engine of rank `where`, then sync without a fault."""
    worker = make_worker(directory, parallel)
    _small_buckets(worker)
    engine = Engine(worker)
    sync_weights(worker, engine, 0)
    old = engine.held
    with torch.no_grad():
        for p in worker.actor.parameters():
            p.mul_(2)  # the same for all copies of a parameter
    engine.fault = fault
    engine.faults_left = tries if rank == where else 0
    result: dict[str, Any] = {"refused": ""}
    try:
        result["again"] = sync_weights(worker, engine, 1)
    except UpdateRefused as e:
        result["refused"] = str(e)
        result["kept"] = engine.version == 0 and all(torch.equal(x, old[n]) for n, x in engine.held.items())
    result["after"] = sync_weights(worker, engine, 2)
    result["right"] = engine.version == 2 and all(torch.equal(x, 2 * old[n]) for n, x in engine.held.items())
    return result


def killed(rank: int, directory: str, parallel: dict[str, Any], where: int) -> tuple[str, bool]:
    """Kill rank `where` during an update; return the error of the others, and whether their engines are unchanged."""
    worker = make_worker(directory, parallel)
    _small_buckets(worker)
    engine = Engine(worker)
    sync_weights(worker, engine, 0)
    old = dict(engine.held)
    engine.fault = "die"
    engine.faults_left = int(rank == where)
    try:
        engine.update_weights(worker.hf_tensors(), 1)
    except UpdateRefused as e:
        return str(e), engine.version == 0 and all(torch.equal(x, old[n]) for n, x in engine.held.items())
    return "", False


def drifted(rank: int, directory: str, parallel: dict[str, Any]) -> str:
    """Return the error if a parameter differs in one bit on rank 1."""
    worker = make_worker(directory, parallel)
    if rank == 1:
        with torch.no_grad():
            next(iter(worker.actor.parameters())).view(torch.int32).view(-1)[3] ^= 1
    try:
        sync_weights(worker, Engine(worker), 0)
    except UpdateRefused as e:
        return str(e)
    return ""


def verified(_rank: int, directory: str, parallel: dict[str, Any], wrong: bool) -> float | str:
    """Verify a TorchEngine; wrong: the engine has the weights of another step."""
    worker = make_worker(directory, parallel)
    engine = TorchEngine(worker.shape, hf_shapes(worker.shape), torch.device("cpu"), torch.float32, 100, sample_tokens)
    sync_weights(worker, engine, 0)
    if wrong:
        with torch.no_grad():
            for p in worker.actor.parameters():
                p.mul_(1.01)
    config = Config(train=TrainConfig(verify_tolerance=1e-4))
    try:
        return verify_weights(worker, Watchdog(engine, 60.0), 0, config)[0].max
    except UserError as e:
        return str(e)


class CpuCopies(GlooCopyService):
    """Megatron's copy service over gloo, without the CUDA stream that it only waits for."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.gloo_pg = dist.group.WORLD
        self.send_ops = []
        self.recv_ops = []
        self._copy_stream = None


def between_layouts(_rank: int, directory: str, source: dict[str, Any], target: dict[str, Any]) -> list[str]:
    """Reshard by megatron.core.resharding, and compare our stream of the result with the directory."""
    first = make_worker(directory, source)
    second = Worker(first.shape, grid_of(**target), OPTIONS)
    with torch.no_grad():
        for p in second.actor.parameters():
            p.fill_(7.0)
    with cpu_bridge.bridge():
        swap_model_weights(first.actor, second.actor, CpuCopies())
    expected = load_file(os.path.join(directory, "model.safetensors"))
    return [n for n, x in second.hf_tensors() if not torch.equal(x, expected[n])]


def load_converted(
    _rank: int, directory: str, checkpoint: str, parallel: dict[str, Any]
) -> tuple[list[str], list[torch.Tensor]]:
    """Load a converted checkpoint by Megatron; return the names of different tensors, and log-probs."""
    worker = Worker(make_worker(directory, parallel).shape, grid_of(**parallel), OPTIONS)
    with torch.no_grad():
        for p in worker.actor.parameters():
            p.fill_(7.0)
    with cpu_bridge.bridge():
        state = dist_checkpointing.load({"model": worker.actor.sharded_state_dict(prefix="")}, checkpoint)
        worker.actor.load_state_dict(state["model"])
    expected = load_file(os.path.join(directory, "model.safetensors"))
    wrong = [n for n, x in worker.hf_tensors() if not torch.equal(x, expected[n])]
    return wrong, worker.log_probs(*rows(1), 1.0)


def save_by_megatron(rank: int, directory: str, checkpoint: str, parallel: dict[str, Any]) -> None:
    """Save a checkpoint by Megatron."""
    worker = make_worker(directory, parallel)
    multiprocessing.current_process()._config["daemon"] = False  # the saver starts processes of its own
    with contextlib.suppress(FileExistsError):
        os.mkdir(checkpoint)
    dist.barrier()
    with cpu_bridge.bridge():
        dist_checkpointing.save({"model": worker.actor.sharded_state_dict(prefix="")}, checkpoint)
    dist.barrier()
