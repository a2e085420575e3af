"""Sending weights from the trainer to engines: one file in shared memory per node.

The ranks of a node write an update together. Every rank is sent every tensor, because making them is a collective; one
rank copies each tensor to the host, and one of its threads writes and checks it there. Then every engine of the node
gets a hard link to the file, which it deletes when it has other weights. The file outlives engine processes, so that a
new one gets the same weights without asking the trainer's ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_brorl.errors import UserError
from megatron_brorl.ops.checksum import checksum
from megatron_brorl.ops.fp8_blocks import quantize
from megatron_brorl.rollout.remote.weights_receive import TensorRecord, map_file, tensor_at
from megatron_brorl.rollout.weight_receiver import UpdateRefused, receive_each

BUCKET_BYTES = 256 << 20  # of tensors that a worker loads at a time
THREADS = 4  # of a rank
SCALE = "_scale_inv"  # ends the name of the scales of the weight before it
_WAITING = 2 * THREADS  # tensors whose copies wait for a thread, at most
_ALIGN = 64  # bytes between the starts of two tensors
_LINEARS = tuple(f"{x}_proj.weight" for x in ("q", "k", "v", "o", "gate", "up", "down"))

# Maps (Hugging Face name, tensor [any shape]) to the named tensors that are sent to the engine in its place.
Encode = Callable[[str, Tensor], Iterator[tuple[str, Tensor]]]
Checksums = dict[str, int]  # of the tensors in the file, by name


def unchanged(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensor itself."""
    yield name, tensor


def to_fp8_blocks(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a linear layer's weight [N, K] in FP8 with a scale per 128 x 128 block, and any other tensor as it is.

    weight = fp8 * scale_inv up to rounding, as block-scaled Hugging Face checkpoints (quant_method "fp8") hold it:
    DeepSeek-V3 (arXiv 2412.19437, 3.3).
    """
    if name.endswith(_LINEARS):
        weight, scale_inv = quantize(tensor)
        yield name, weight
        yield f"{name}{SCALE}", scale_inv
    else:
        yield name, tensor


@dataclass(frozen=True)
class HostWeights:
    """One version of the weights in a file in memory."""

    path: Path
    version: int
    records: tuple[TensorRecord, ...]

    def buckets(self, limit: int = BUCKET_BYTES) -> Iterator[list[TensorRecord]]:
        """Yield buckets of consecutive records, each of at most `limit` bytes.

        A bucket exceeds the limit if its first record does, or to keep the scales of a weight in the weight's bucket.
        """
        bucket: list[TensorRecord] = []
        size = 0
        for record in self.records:
            if bucket and size + record.nbytes > limit and not record.name.endswith(SCALE):
                yield bucket
                bucket = []
                size = 0
            bucket.append(record)
            size += record.nbytes
        if bucket:
            yield bucket

    def delete(self) -> None:
        """Remove this engine's name of the file; its memory is free when no engine of the node has one any more."""
        self.path.unlink(missing_ok=True)


@dataclass(frozen=True)
class NodeRanks:
    """The ranks of a machine that write an update together."""

    rank: int  # of this one among them
    size: int
    folder: Path  # in memory; the one of the first of them, which makes the file
    exchange: Callable[[Any], list[Any]]  # a collective: returns what each of them gives, in order

    @staticmethod
    def alone(folder: Path) -> NodeRanks:
        """Return the node of a rank that writes by itself."""
        return NodeRanks(0, 1, folder, lambda own: [own])


@dataclass(frozen=True)
class WeightUpdate:
    """One update that is written."""

    number: int  # the same on all ranks of the node
    version: int  # of the weights
    names: Mapping[str, tuple[int, ...]]  # every tensor of the model with its shape
    dtype: torch.dtype  # of tensors before `encode`
    encode: Encode


def write_update(
    tensors: Iterable[tuple[str, Tensor]], update: WeightUpdate, node: NodeRanks, link: Path | None
) -> HostWeights | None:
    """Write a complete, checked update (tensors [any shape]); a collective of the node.

    link: path of the hard link for the engine that this rank leads. On ranks that lead none it is None, and they return
    None. Raises UpdateRefused on all ranks of the node if one of them finds a fault, and UserError if shared memory has
    no room for the file.
    """
    records, size = file_layout(update.names, update.dtype, update.encode)
    path = node.folder / f"staged_{update.number}"

    # The first rank makes the file. The stream is read to its end in any case.
    fault = ""
    if node.rank == 0:
        try:
            allocate(path, size)
        except UserError as e:
            fault = str(e)
    fault = node.exchange(fault)[0]
    if fault:
        for _ in tensors:
            pass
        raise UserError(fault)

    # Each rank writes its share, and checks its own stream as a whole. One rank's fault refuses the update for all.
    own = {name for name, rank in assign_writers(update.names, node.size).items() if rank == node.rank}
    sums: Checksums = {}
    try:
        sums = _write(tensors, update, own, records, path)
    except UpdateRefused as e:
        fault = str(e)
    found: list[tuple[str, Checksums]] = node.exchange((fault, sums))
    faults = [f for f, _ in found if f]
    if not faults and link:
        try:
            link.hardlink_to(path)
        except OSError as e:
            fault = f"weight update: {link}: {e.strerror}"

    # The first name goes when all engines have theirs.
    faults += [f for f in node.exchange(fault) if f and f not in faults]
    if node.rank == 0:
        path.unlink()
    if faults:
        if link:
            link.unlink(missing_ok=True)
        raise UpdateRefused(fault or faults[0])
    # Every rank's part of the checksums makes the table that all engines read by.
    total = {name: value for _, part in found for name, value in part.items()}
    whole = tuple(record._replace(checksum=total[record.name]) for record in records)
    return HostWeights(link, update.version, whole) if link else None


def file_layout(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, encode: Encode
) -> tuple[list[TensorRecord], int]:
    """Return the records of all tensors in an update file, with checksums 0, and the size of the file in bytes.

    shapes: name -> shape of each tensor before `encode`. The ranks of a node compute the same layout without
    communication.
    """
    records = []
    offset = 0
    for name, shape in shapes.items():
        for sent, x in encode(name, torch.empty(shape, dtype=dtype, device="meta")):
            record = TensorRecord(sent, str(x.dtype).removeprefix("torch."), tuple(x.shape), offset, 0)
            records.append(record)
            # Unaligned, the next tensor could not be viewed in its own dtype.
            offset = -(-(offset + record.nbytes) // _ALIGN) * _ALIGN
    return records, offset


def assign_writers(names: Mapping[str, tuple[int, ...]], ranks: int) -> dict[str, int]:
    """Return the rank of a node that writes each tensor: the one that has least to write so far."""
    load = [0] * ranks
    owner = {}
    for name, shape in names.items():
        owner[name] = load.index(min(load))
        load[owner[name]] += torch.Size(shape).numel()
    return owner


def allocate(path: Path, size: int) -> None:
    """Make a file of `size` bytes. Raises UserError where its folder has no room for it."""
    try:
        # Without memory behind it, touching a page of the mapped file would end the process by a signal.
        with open(path, "xb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as e:
        path.unlink(missing_ok=True)
        raise UserError(
            f"engine.shared_memory: {path.parent} has no room for {size / 2**20:.0f} MiB of weights ({e.strerror}): "
            "enlarge it (docker run --shm-size) or name another folder in memory"
        ) from None


def _write(
    tensors: Iterable[tuple[str, Tensor]], update: WeightUpdate, own: set[str], records: list[TensorRecord], path: Path
) -> Checksums:
    """Read the stream to its end and write the tensors in `own`. Raises UpdateRefused."""
    memory = map_file(path)
    records_by_name = {record.name: record for record in records}
    sums: Checksums = {}
    faults: list[str] = []
    waiting: list[Future[None]] = []

    def write(name: str, tensor: Tensor, expected: Tensor | None) -> None:
        # Compute the checksum from the file, because workers read those bytes. If `encode` or the dtype changes the
        # tensor, the expected checksum does not apply to the file and is compared with the received tensor instead.
        sent = dict(update.encode(name, tensor.to(update.dtype)))
        for part, x in sent.items():
            written = tensor_at(memory, records_by_name[part])
            written.copy_(x)
            sums[part] = int(checksum(part, written))
        if expected is not None:
            same = sent.keys() == {name} and sent[name].dtype == tensor.dtype
            if (sums[name] if same else int(checksum(name, tensor))) != int(expected):
                faults.append(name)

    with ThreadPoolExecutor(THREADS, thread_name_prefix="staging") as pool:

        def write_own(name: str, tensor: Tensor, expected: Tensor | None) -> None:
            if name not in own:
                return
            # A copy, because the stream's tensors are views of buffers that are used again.
            waiting.append(pool.submit(write, name, tensor.detach().clone(), expected))
            # Without a limit the whole model would wait on the device.
            if len(waiting) > _WAITING:
                waiting.pop(0).result()

        receive_each(tensors, update.names, write_own)
        for future in waiting:
            future.result()
    if faults:
        what = f"{len(faults)} tensors are not what was sent (checksum), for example {min(faults)}"
        raise UpdateRefused(f"weight update: {what}")
    return sums
