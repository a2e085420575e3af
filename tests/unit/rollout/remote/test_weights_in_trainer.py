"""Tests of writing a weight update to shared memory by the ranks of a node."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from checksums import with_checksums

from megatron_brorl.errors import UserError
from megatron_brorl.ops.checksum import ChecksummedTensor, checksum
from megatron_brorl.rollout.remote.weights_in_trainer import (
    HostWeights,
    NodeRanks,
    WeightUpdate,
    assign_writers,
    file_layout,
    to_fp8_blocks,
    unchanged,
    write_update,
)
from megatron_brorl.rollout.remote.weights_in_worker import TensorRecord, map_file, tensor_at
from megatron_brorl.rollout.weight_stream import UpdateRefused

BF16 = torch.bfloat16
SHAPES = {"embed": (64, 8), "a.q_proj.weight": (130, 70), "norm": (7,), "b.q_proj.weight": (3, 5), "head": (64, 8)}
SHAPES |= {f"layer.{i}": (11, i + 1) for i in range(40)}


def model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def read(weights):
    memory = map_file(str(weights.path))
    return {record.name: tensor_at(memory, record) for record in weights.records}


def write_on_all_ranks(path, streams, dtype=torch.float32, encode=unchanged):
    """Return each rank's result or exception of write_update, and the names of the tensors that each rank copied."""
    ranks = len(streams)
    barrier, gathered = threading.Barrier(ranks), [None] * ranks
    copies: list[set[str]] = [set() for _ in range(ranks)]

    def rank(i):
        def exchange(value):
            gathered[i] = value
            barrier.wait(60)
            result = list(gathered)
            barrier.wait(60)  # The next exchange overwrites `gathered`.
            return result

        def recorded(name, tensor):
            if tensor.device.type != "meta":
                copies[i].add(name)
            return encode(name, tensor)

        update = WeightUpdate(version=7, names=SHAPES, dtype=dtype, encode=recorded)
        own_path = path if i == 0 else path.parent / f"unused_{i}"  # All ranks must write to the path of rank 0.
        try:
            return write_update(iter(streams[i]), update, NodeRanks(i, ranks, exchange), own_path)
        except (UpdateRefused, UserError) as e:
            return e

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(rank, range(ranks))), copies


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp8"])
def test_engines_of_a_node_share_one_file(ranks, kind, tmp_path):
    dtype = torch.float32 if kind == "fp32" else BF16
    encode = to_fp8_blocks if kind == "fp8" else unchanged
    for scale in (1.0, 0.5):  # The second update overwrites the file of the first.
        sent = {name: tensor * scale for name, tensor in model().items()}
        streams = [with_checksums(sent.items()) for _ in range(ranks)]
        results, copies = write_on_all_ranks(tmp_path / "weights", streams, dtype, encode)

        # Exactly one rank copies each tensor, and all ranks have the same file.
        assert sorted(name for names in copies for name in names) == sorted(SHAPES)
        assert all(weights == results[0] for weights in results)
        assert results[0].version == 7
        assert list(tmp_path.iterdir()) == [results[0].path]
        assert os.stat(results[0].path).st_size == file_layout(SHAPES, dtype, encode)[1]  # its size in bytes

        # The tensors in the file equal those that were sent, and match the checksums in the records.
        expected = {key: part for name, tensor in sent.items() for key, part in encode(name, tensor.to(dtype))}
        stored = read(results[0])
        assert stored.keys() == expected.keys()
        for record in results[0].records:
            assert torch.equal(stored[record.name].view(torch.uint8), expected[record.name].view(torch.uint8))
            assert record.checksum == int(checksum(record.name, expected[record.name]))
            assert record.offset % 64 == 0


def test_files_are_mapped_and_registered_once(tmp_path, monkeypatch):
    registered = []
    runtime = SimpleNamespace(cudaHostRegister=lambda *arguments: registered.append(arguments) or 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda result: None)
    path = tmp_path / "weights"
    path.write_bytes(b"\1" * 8192)
    memory = map_file(str(path))
    assert map_file(str(path)) is memory
    assert registered == [(memory.data_ptr(), 8192, 1)]  # 1: cudaHostRegisterPortable
    memory.fill_(2)
    assert path.read_bytes() == b"\2" * 8192


def damaged(pairs, name):
    return [ChecksummedTensor(name, pair[1] + 1, pair.checksum) if pair[0] == name else pair for pair in pairs]


@pytest.mark.parametrize("fault", ["missing", "damaged", "breaks off"])
def test_fault_on_one_rank_refuses_the_update_on_all(fault, tmp_path):
    writers = assign_writers(SHAPES, 3)
    name = next(name for name, rank in writers.items() if rank == 1)  # a tensor that the faulty rank copies
    pairs = list(with_checksums(model().items()))

    def broken():
        yield from pairs[:9]
        raise RuntimeError("lost")

    faulty_streams = {"missing": pairs[:-1], "damaged": damaged(pairs, name), "breaks off": broken()}
    messages = {"missing": "1 tensors missing", "damaged": f"for example {name}", "breaks off": "RuntimeError: lost"}
    results, _ = write_on_all_ranks(tmp_path / "weights", [pairs, faulty_streams[fault], pairs])
    assert all(isinstance(result, UpdateRefused) for result in results)
    assert all(messages[fault] in str(result) for result in results)


def test_full_shared_memory_is_an_error_on_all_ranks(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    streams = [with_checksums(model().items()) for _ in range(2)]
    results, _ = write_on_all_ranks(tmp_path / "weights", streams)
    assert all(isinstance(result, UserError) for result in results)
    assert all("engine.shared_memory: " in str(result) and "has no room for 0 MiB" in str(result) for result in results)
    # Each rank read its stream to the end in spite of the failure, because other nodes take part in the stream.
    assert all(list(stream) == [] for stream in streams)
    assert list(tmp_path.iterdir()) == []


def test_buckets_keep_scales_with_their_weights(tmp_path):
    sizes = {"a": 60, "b": 14, "c.weight": 9100, "c.weight_scale_inv": 8, "d": 16}
    records = tuple(TensorRecord(name, "uint8", (size,), offset=0, checksum=0) for name, size in sizes.items())
    weights = HostWeights(tmp_path / "w", version=5, records=records)
    assert [[record.name for record in bucket] for bucket in weights.buckets(70)] == [
        ["a"],
        ["b"],
        ["c.weight", "c.weight_scale_inv"],
        ["d"],
    ]
    assert [record for bucket in weights.buckets(1 << 30) for record in bucket] == list(records)
