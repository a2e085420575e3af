"""The weights of one version in shared host memory: written once by a trainer rank, read by its engine's workers.

The file outlives the engine process, so that a new one gets the same weights without asking the trainer's ranks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_brorl.errors import UserError
from megatron_brorl.ops.checksum import checksum

BUCKET_BYTES = 256 << 20  # of tensors that a worker loads at a time
SCALE = "_scale_inv"  # ends the name of the scales of the weight before it
_ALIGN = 64  # bytes between the starts of two tensors


class TensorRecord(NamedTuple):
    """One tensor of an update: what it is and where it lies. A list in JSON."""

    name: str
    dtype: str  # "bfloat16"
    shape: tuple[int, ...]
    offset: int  # in bytes; 0 for a tensor that travels by its handle
    checksum: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class HostWeights:
    """A file in memory and what lies where."""

    path: Path
    version: int
    records: tuple[TensorRecord, ...]

    def buckets(self, limit: int = BUCKET_BYTES) -> Iterator[list[TensorRecord]]:
        """Consecutive records of at most `limit` bytes together; a larger one comes alone, scales with their weight."""
        bucket: list[TensorRecord] = []
        size = 0
        for record in self.records:
            if bucket and size + record.nbytes > limit and not record.name.endswith(SCALE):
                yield bucket
                bucket, size = [], 0
            bucket.append(record)
            size += record.nbytes
        if bucket:
            yield bucket

    def delete(self) -> None:
        """Remove the file; who has read tensors from it keeps them."""
        self.path.unlink(missing_ok=True)


def write(path: Path, tensors: Iterable[tuple[str, Tensor]], version: int, size: int, key: str) -> HostWeights:
    """Put tensors [any shape] that take `size` bytes at most (see `room`) into a new file.

    key: of the configuration, that names the folder. Raises UserError where the folder has no room for them.
    """
    try:
        # Touching a page of a mapped file that the folder has no room for would end the process by a signal.
        with open(path, "xb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as e:
        path.unlink(missing_ok=True)  # what there was room for would stay taken
        raise UserError(
            f"{key}: {path.parent} has no room for {size / 2**20:.0f} MiB of weights ({e.strerror}): "
            "enlarge it (docker run --shm-size) or name another folder in memory"
        ) from None

    # The checksum is of what lies in the file, which is what a worker will read.
    memory = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    records: list[TensorRecord] = []
    offset = 0
    for name, tensor in tensors:
        # The record is complete when its bytes are in place.
        place = TensorRecord(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset, 0)
        view = _view(memory, place)
        view.copy_(tensor)
        records.append(place._replace(checksum=int(checksum(name, view))))
        # Aligned, or the next tensor could not be viewed in its own dtype.
        offset = -(-(offset + place.nbytes) // _ALIGN) * _ALIGN

    # Quantised tensors take less than was set aside.
    os.truncate(path, offset)
    return HostWeights(path, version, tuple(records))


def read(path: str, records: Sequence[TensorRecord]) -> dict[str, Tensor]:
    """Views [any shape] of the given tensors in the file by name; they stay valid while they are held."""
    memory = torch.from_file(path, shared=True, size=os.path.getsize(path), dtype=torch.uint8)
    return {record.name: _view(memory, record) for record in records}


def room(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> int:
    """Bytes that tensors of these shapes take; quantised they take less."""
    return sum(math.prod(s) * dtype.itemsize + 2 * _ALIGN for s in shapes.values())


def _view(memory: Tensor, record: TensorRecord) -> Tensor:
    own = memory[record.offset : record.offset + record.nbytes]
    return own.view(getattr(torch, record.dtype)).view(record.shape)
