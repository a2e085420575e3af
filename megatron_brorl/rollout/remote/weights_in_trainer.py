"""The weights of an update in the trainer, which sends them to engines through one file in shared memory per node.

Every rank of a node receives every tensor, because producing tensors is a collective. Each tensor is written to the
file by one rank. The file outlives engine processes: a restarted engine loads the same weights without a collective.

Updates overwrite the file of an older update, because allocating shared memory takes longer than copying the weights. A
second file is used only while engines hold the weights of the first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_brorl.errors import UserError
from megatron_brorl.ops.checksum import checksum
from megatron_brorl.rollout.remote.weights_in_worker import TensorRecord, map_file, tensor_at
from megatron_brorl.rollout.weight_stream import NamedTensors, Shapes, UpdateRefused, receive_each

BUCKET_BYTES = 256 << 20  # size of the tensors that a worker loads together
THREADS = 4  # that write tensors, per rank
BLOCK = 128  # rows and columns that share a scale
FP8_MAX = 448.0  # the largest finite float8_e4m3fn
SCALE = "_scale_inv"  # suffix of the name of a weight's scales
_MAX_WAITING = 2 * THREADS  # maximum number of copies that wait for a thread
_ALIGN = 64  # alignment of tensors in bytes
_LINEARS = tuple(f"{x}_proj.weight" for x in ("q", "k", "v", "o", "gate", "up", "down"))

# Converts (Hugging Face name, tensor [any shape]) to the named tensors that the engine receives.
Encode = Callable[[str, Tensor], Iterator[tuple[str, Tensor]]]
Checksums = dict[str, int]  # by name of the tensor in the file


def unchanged(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensor itself."""
    yield name, tensor


def to_fp8_blocks(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a linear layer's weight [N, K] in FP8 with a scale per 128 x 128 block. Yield other tensors unchanged.

    weight = fp8 * scale_inv up to rounding, as in block-scaled Hugging Face checkpoints (quant_method "fp8") and in
    DeepSeek-V3 (arXiv 2412.19437, section 3.3).
    """
    if name.endswith(_LINEARS):
        weight, scale_inv = quantize(tensor)
        yield name, weight
        yield f"{name}{SCALE}", scale_inv
    else:
        yield name, tensor


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [N, K] in float8_e4m3fn, and the scales [ceil(N/128), ceil(K/128)] in float32.

    A scale is the largest magnitude of its block divided by 448. The scale of a block of zeros is 1. Values are
    rounded to nearest, ties to even.
    """
    n, k = x.shape
    padded = pad(x.float(), (0, -k % BLOCK, 0, -n % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)  # 128 x 128 in dims 1, 3
    amax = blocks.abs().amax(dim=(1, 3))
    scale = torch.where(amax > 0, amax / FP8_MAX, torch.ones_like(amax))
    scaled = (blocks / scale[:, None, :, None]).view_as(padded)[:n, :k]
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


@dataclass(frozen=True)
class HostWeights:
    """One version of the weights in a file in shared memory, until an update overwrites it."""

    path: Path
    version: int
    records: tuple[TensorRecord, ...]

    def buckets(self, limit: int = BUCKET_BYTES) -> Iterator[list[TensorRecord]]:
        """Yield buckets of consecutive records with at most `limit` bytes each.

        A bucket is larger if its first record is larger, or if it must keep a weight and its scales together.
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


@dataclass(frozen=True)
class NodeRanks:
    """The ranks of a node, which write updates together."""

    rank: int = 0  # index of this rank in the node
    size: int = 1
    exchange: Callable[[Any], list[Any]] = lambda value: [value]  # all-gather of objects among the ranks


@dataclass(frozen=True)
class WeightUpdate:
    """Description of one update."""

    version: int  # of the weights
    names: Shapes  # shape of every tensor of the model
    dtype: torch.dtype  # dtype of the tensors passed to `encode`
    encode: Encode


def write_update(tensors: NamedTensors, update: WeightUpdate, node: NodeRanks, path: Path) -> HostWeights:
    """Write and check an update (tensors [any shape]). Collective of the node.

    path: the file on the first rank, new or with weights that no engine needs. Other ranks' paths are ignored. Raises
    UpdateRefused on all ranks of the node if one finds a fault, UserError if the file does not fit in memory.
    """
    records, size = file_layout(update.names, update.dtype, update.encode)

    # The first rank creates the file. If that fails, every rank still reads the stream to its end.
    fault = ""
    if node.rank == 0 and not path.exists():
        try:
            allocate(path, size)
        except UserError as e:
            fault = str(e)
    fault, path = node.exchange((fault, path))[0]
    if fault:
        for _ in tensors:
            pass
        raise UserError(fault)

    # Each rank writes its share and checks its whole stream. A fault on one rank refuses the update on all of them.
    own_names = {name for name, rank in assign_writers(update.names, node.size).items() if rank == node.rank}
    sums: Checksums = {}
    try:
        sums = _write(tensors, update, own_names, records, path)
    except UpdateRefused as e:
        fault = str(e)
    rank_results: list[tuple[str, Checksums]] = node.exchange((fault, sums))
    faults = [rank_fault for rank_fault, _ in rank_results if rank_fault]
    if faults:
        raise UpdateRefused(fault or faults[0])
    all_sums = {name: value for _, rank_sums in rank_results for name, value in rank_sums.items()}
    return HostWeights(path, update.version, tuple(r._replace(checksum=all_sums[r.name]) for r in records))


def file_layout(shapes: Shapes, dtype: torch.dtype, encode: Encode) -> tuple[list[TensorRecord], int]:
    """Return the records of all tensors in an update file, without checksums, and its size in bytes.

    shapes: shape of each tensor before `encode`. All ranks of a node compute the same layout.
    """
    records = []
    offset = 0
    for name, shape in shapes.items():
        for sent_name, encoded in encode(name, torch.empty(shape, dtype=dtype, device="meta")):
            dtype_name = str(encoded.dtype).removeprefix("torch.")
            record = TensorRecord(sent_name, dtype_name, tuple(encoded.shape), offset, checksum=0)
            records.append(record)
            # Tensor.view(dtype) needs an aligned offset.
            offset = -(-(offset + record.nbytes) // _ALIGN) * _ALIGN
    return records, offset


def assign_writers(names: Shapes, ranks: int) -> dict[str, int]:
    """Assign each tensor to the rank with the fewest elements so far. Return the rank of each tensor by name."""
    load = [0] * ranks
    owner = {}
    for name, shape in names.items():
        owner[name] = load.index(min(load))
        load[owner[name]] += torch.Size(shape).numel()
    return owner


def allocate(path: Path, size: int) -> None:
    """Allocate a file of `size` bytes. Raises UserError if its folder has no room for it."""
    try:
        # Reserve the memory now, because writing to a mapped page without memory raises SIGBUS.
        with open(path, "xb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as e:
        path.unlink(missing_ok=True)
        raise UserError(
            f"engine.shared_memory: {path.parent} has no room for {size / 2**20:.0f} MiB of weights ({e.strerror}): "
            "enlarge it (docker run --shm-size) or name another folder in memory"
        ) from None


def _write(
    tensors: NamedTensors, update: WeightUpdate, own_names: set[str], records: list[TensorRecord], path: Path
) -> Checksums:
    """Read the stream to its end, write the tensors `own_names` and return the checksums. Raises UpdateRefused."""
    memory = map_file(str(path))
    records_by_name = {record.name: record for record in records}
    sums: Checksums = {}
    faults: list[str] = []
    waiting: list[Future[None]] = []

    def write(name: str, tensor: Tensor, expected: Tensor | None) -> None:
        # Compute the checksum where the tensor is. Workers compare it with their copy, which covers the file. If
        # `encode` or the dtype changes the tensor, the expected checksum is compared with the received tensor instead.
        sent = dict(update.encode(name, tensor.to(update.dtype)))
        for sent_name, x in sent.items():
            tensor_at(memory, records_by_name[sent_name]).copy_(x)
            sums[sent_name] = int(checksum(sent_name, x))
        if expected is not None:
            is_unchanged = sent.keys() == {name} and sent[name].dtype == tensor.dtype
            if (sums[name] if is_unchanged else int(checksum(name, tensor))) != int(expected):
                faults.append(name)

    with ThreadPoolExecutor(THREADS, thread_name_prefix="staging") as pool:

        def write_own(name: str, tensor: Tensor, expected: Tensor | None) -> None:
            if name not in own_names:
                return
            # Copy the tensor, because the stream reuses its buffers.
            waiting.append(pool.submit(write, name, tensor.detach().clone(), expected))
            # Without this limit, copies of the whole model could accumulate on the device.
            if len(waiting) > _MAX_WAITING:
                waiting.pop(0).result()

        receive_each(tensors, update.names, write_own)
        for future in waiting:
            future.result()
    if faults:
        what = f"{len(faults)} tensors do not match their checksums, for example {min(faults)}"
        raise UpdateRefused(f"weight update: {what}")
    return sums
