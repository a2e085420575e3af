"""Weight sync from any layout to the engines is bit-exact; faults are found, reported and repaired."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from conversions import assert_same_weights, to_hf, to_megatron
from dist.jobs import make_worker
from dist.world import CP, EP, PP, SEQUENCE, TP, World, pairs
from megatron.core import dist_checkpointing
from safetensors.torch import load_file

from megatron_brorl.config.schema import Config, TrainConfig
from megatron_brorl.errors import UserError
from megatron_brorl.models.weights.names import hf_shapes
from megatron_brorl.models.weights.stream import make_buckets
from megatron_brorl.ops.checksum import ChecksummedTensor
from megatron_brorl.ops.reference.sampling import sample_tokens
from megatron_brorl.parallel import cpu_bridge
from megatron_brorl.rollout.native.torch_engine import TorchEngine
from megatron_brorl.rollout.watchdog import Watchdog
from megatron_brorl.rollout.weight_stream import UpdateRefused, receive
from megatron_brorl.train.weight_sync import sync_weights, verify_weights
from megatron_brorl.train.worker import Worker

pytestmark = pytest.mark.slow
BIG = (4, TP | PP)  # ranks and layout


class Engine:
    """Keeps the tensors that it receives, by name. fault: the damage to the next `faults_left` streams."""

    def __init__(self, worker: Worker) -> None:
        self.names = hf_shapes(worker.shape)
        self.weights: dict[str, torch.Tensor] = {}
        self.version = -1
        self.fault = ""
        self.faults_left = 0

    def update_weights(self, tensors: Any, version: int) -> None:
        if self.faults_left:
            self.faults_left -= 1
            tensors = FAULTS[self.fault](tensors)
        self.weights = receive(tensors, self.names, torch.device("cpu"), torch.float32)
        self.version = version


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


FAULTS = {"flip": _flip, "stop": _stop, "die": _die}


def _worker_and_engine(directory: str, parallel: dict[str, Any]) -> tuple[Worker, Engine]:
    """Return a worker whose few kilobytes of weights are sent in several buckets per stage, and its engine."""
    worker = make_worker(directory, parallel)
    table = [entry for bucket in worker.buckets for entry in bucket]
    worker.buckets = make_buckets(table, item_bytes=4, limit=30_000, expert_ranks=worker.grid.ep_size)
    assert len(worker.buckets) > 4
    return worker, Engine(worker)


def syncs(_rank: int, directories: list[str], parallel: dict[str, Any]) -> list[str]:
    """Sync the weights of each directory; return the names of tensors that did not arrive bit by bit."""
    worker, engine = _worker_and_engine(directories[0], parallel)
    wrong = []
    for version, directory in enumerate(directories):
        worker.load_hf(directory)
        assert sync_weights(worker, engine, version) == 0
        assert engine.version == version
        expected = load_file(os.path.join(directory, "model.safetensors"))
        expected = {name: expected[name] for name in engine.names}
        assert engine.weights.keys() == expected.keys()
        wrong += [f"{version}: {n}" for n, x in expected.items() if not torch.equal(engine.weights[n], x)]
    return wrong


def damaged(rank: int, directory: str, parallel: dict[str, Any], fault: str, faulty: int, tries: int) -> dict[str, Any]:
    """Damage `tries` updates in a row on the engine of rank `faulty`, then sync without a fault."""
    worker, engine = _worker_and_engine(directory, parallel)
    sync_weights(worker, engine, version=0)
    old = engine.weights
    with torch.no_grad():
        for p in worker.actor.parameters():
            p.mul_(2)  # the same for all copies of a parameter
    engine.fault = fault
    engine.faults_left = tries if rank == faulty else 0
    result: dict[str, Any] = {"refused": ""}
    try:
        result["repeats"] = sync_weights(worker, engine, version=1)
    except UpdateRefused as e:
        result["refused"] = str(e)
        result["kept"] = engine.version == 0 and all(torch.equal(x, old[n]) for n, x in engine.weights.items())
    result["repeats_of_next"] = sync_weights(worker, engine, version=2)
    result["right"] = engine.version == 2 and all(torch.equal(x, 2 * old[n]) for n, x in engine.weights.items())
    return result


def killed(rank: int, directory: str, parallel: dict[str, Any], victim: int) -> tuple[str, bool]:
    """Kill rank `victim` during an update; return the error of the others, and whether their engines are unchanged."""
    worker, engine = _worker_and_engine(directory, parallel)
    sync_weights(worker, engine, version=0)
    old = dict(engine.weights)
    engine.fault = "die"
    engine.faults_left = int(rank == victim)
    try:
        engine.update_weights(worker.hf_tensors(), version=1)
    except UpdateRefused as e:
        return str(e), engine.version == 0 and all(torch.equal(x, old[n]) for n, x in engine.weights.items())
    return "", False


def drifted(rank: int, directory: str, parallel: dict[str, Any]) -> str:
    """Return the error if a parameter differs in one bit on rank 1."""
    worker = make_worker(directory, parallel)
    if rank == 1:
        with torch.no_grad():
            next(iter(worker.actor.parameters())).view(torch.int32).view(-1)[3] ^= 1
    try:
        sync_weights(worker, Engine(worker), version=0)
    except UpdateRefused as e:
        return str(e)
    return ""


def verified(_rank: int, directory: str, parallel: dict[str, Any], wrong: bool) -> float | str:
    """Verify a TorchEngine; wrong: the engine has the weights of another step."""
    worker = make_worker(directory, parallel)
    shape, cpu = worker.shape, torch.device("cpu")
    engine = TorchEngine(shape, hf_shapes(shape), cpu, torch.float32, max_rows=100, sample=sample_tokens)
    sync_weights(worker, engine, version=0)
    if wrong:
        with torch.no_grad():
            for p in worker.actor.parameters():
                p.mul_(1.01)
    config = Config(train=TrainConfig(verify_tolerance=1e-4))
    try:
        return verify_weights(worker, Watchdog(engine, timeout_s=60.0), version=0, config=config)[0].max
    except UserError as e:
        return str(e)


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


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Five sets of weights of one model: vocabulary that tensor=2 does not divide, tied, biases."""
    root = tmp_path_factory.mktemp("weights")
    for i in range(5):
        tiny.make_model(root / str(i), "qwen2", tied=True, seed=i)
    return [str(root / str(i)) for i in range(5)]


def test_several_weight_syncs_are_bit_exact(worlds, weights):
    size, parallel = BIG
    assert worlds(size).run("test_weight_sync_of_layouts:syncs", weights, parallel) == [[]] * size


@pytest.mark.parametrize(
    ("size", "parallel", "case"),
    [
        (2, TP, ("qwen3", False)),
        (2, PP, ("qwen2", True)),
        (4, TP, ("llama", True)),
        (2, SEQUENCE | EP, ("qwen2_moe", True)),
        *pairs([(2, CP | EP), (4, EP), (4, SEQUENCE | {"expert": 4}), (4, SEQUENCE | EP | PP)], [("qwen3_moe", True)]),
    ],
)
def test_every_layout_and_family(worlds, tmp_path, size, parallel, case):
    for seed in range(2):
        tiny.make_model(tmp_path / str(seed), *case, seed=seed)
    directories = [str(tmp_path / str(seed)) for seed in range(2)]
    assert worlds(size).run("test_weight_sync_of_layouts:syncs", directories, parallel) == [[]] * size
    if case[0] in tiny.MIXTURES:
        assert max(worlds(size).run("jobs:engine_gap", directories[0], parallel)) <= 5e-5


# unit/rollout/test_weight_stream.py has other faults.
MESSAGES = {
    "flip": "weight update: 1 tensors do not match their checksums, for example model.layers.3.mlp.down_proj.weight",
    "stop": "weight update: failed after 8 of 50 tensors: RuntimeError: engine killed",
}


@pytest.mark.parametrize(("fault", "faulty"), [("flip", 3), ("stop", 0)])
def test_a_fault_on_one_rank_is_repaired_by_sending_again(worlds, weights, fault, faulty):
    size, parallel = BIG
    for result in worlds(size).run("test_weight_sync_of_layouts:damaged", weights[0], parallel, fault, faulty, tries=1):
        assert result == {"refused": "", "repeats": 1, "repeats_of_next": 0, "right": True}


@pytest.mark.parametrize("fault", MESSAGES)
def test_a_permanent_fault_is_refused_by_every_rank(worlds, weights, fault):
    """The engine that refused keeps its version; after the next sync all versions are equal."""
    size, parallel = BIG
    results = worlds(size).run("test_weight_sync_of_layouts:damaged", weights[0], parallel, fault, faulty=2, tries=2)
    for rank, result in enumerate(results):
        expected = MESSAGES[fault] if rank == 2 else "version 1: refused by the engine of another rank"
        assert expected in result["refused"]
        assert result["repeats_of_next"] == 0
        assert result["right"]
    assert results[2]["kept"]


def test_a_rank_that_dies_in_an_update_leaves_the_other_engines_unchanged(weights):
    """After a SIGKILL the other ranks' collective fails, no engine has mixed weights, and a new world works."""
    world = World(4)
    answers = []
    try:
        with pytest.raises((EOFError, ConnectionError)):
            world.run("test_weight_sync_of_layouts:killed", weights[0], BIG[1], victim=0)
        for pipe, process in zip(world.pipes[1:], world.processes[1:], strict=True):
            assert pipe.poll(timeout=120)
            answers.append(pipe.recv())
            process.kill()  # A rank with an error ends, and the ranks that wait for it fail, too.
    finally:
        world.close()
    assert len(answers) == 3
    for ok, (message, unchanged) in answers:
        assert ok
        assert "weight update: failed after" in message
        assert unchanged


def test_different_copies_of_the_weights_are_refused(worlds, weights):
    for message in worlds(2).run("test_weight_sync_of_layouts:drifted", weights[0], {}):
        assert "the ranks were sent different bytes" in message


@pytest.mark.parametrize(("size", "parallel"), [(2, {}), BIG])
def test_verify_weights(worlds, weights, size, parallel):
    gaps = worlds(size).run("test_weight_sync_of_layouts:verified", weights[0], parallel, wrong=False)
    assert len(set(gaps)) == 1
    assert 0 < gaps[0] < 1e-4
    for message in worlds(size).run("test_weight_sync_of_layouts:verified", weights[0], parallel, wrong=True):
        assert "an engine's log-probs differ from the actor's by" in message


@pytest.mark.parametrize("case", [("qwen2", True), ("qwen3", False)])
def test_checkpoints_are_divided_as_megatron_divides_them(worlds, tmp_path, case):
    """Keys, types, global shapes and chunks equal those of Megatron's saver on four ranks, and the way back works."""
    from torch.distributed.checkpoint import FileSystemReader

    tiny.make_model(tmp_path / "hf", *case)
    to_megatron(tmp_path / "hf", tmp_path / "brorl", tensor=2, pipeline=2)
    worlds(4).run(
        "test_weight_sync_of_layouts:save_by_megatron", str(tmp_path / "hf"), str(tmp_path / "megatron"), BIG[1]
    )

    def described(name):
        entries = {}
        for key, meta in FileSystemReader(tmp_path / name).read_metadata().state_dict_metadata.items():
            if key.startswith("common_state/"):
                continue  # Megatron-Core 0.19 writes a copy of common.pt here, and reads either.
            entries[key] = None
            if hasattr(meta, "chunks"):
                chunks = sorted((tuple(c.offsets), tuple(c.sizes)) for c in meta.chunks)
                entries[key] = (tuple(meta.size), meta.properties.dtype, chunks)
        return entries

    assert described("brorl") == described("megatron")
    actual, expected = (json.loads((tmp_path / name / "metadata.json").read_text()) for name in ("brorl", "megatron"))
    assert expected.items() <= actual.items()  # Megatron-Core 0.19 names no backend of common.pt any more.
    to_hf(tmp_path / "megatron", tmp_path / "back", config=tmp_path / "hf")
    assert_same_weights(tmp_path / "hf", tmp_path / "back")
