"""The weights of one version in shared host memory: one file on a node, read by the workers of all of its engines.

The file outlives the engine processes, so that a new one gets the same weights without asking the trainer's ranks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_brorl.errors import UserError

BUCKET_BYTES = 256 << 20  # of tensors that a worker loads at a time
SCALE = "_scale_inv"  # ends the name of the scales of the weight before it
_ALIGN = 64  # bytes between the starts of two tensors

# (Hugging Face name, tensor [any shape]) -> what the engine is sent for it, by name
Form = Callable[[str, Tensor], Iterator[tuple[str, Tensor]]]


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
        """Remove this name of the file, whose memory is free when no engine of the node has one for it any more. Who
        has read tensors from it keeps them."""
        self.path.unlink(missing_ok=True)


def layout(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, form: Form) -> tuple[list[TensorRecord], int]:
    """Where everything lies that is sent for tensors of these shapes, checksums left out, and the file's bytes.

    form: what is sent for a tensor. Every rank of a node comes to the same answer without asking the others.
    """
    records, offset = [], 0
    for name, shape in shapes.items():
        for sent, x in form(name, torch.empty(shape, dtype=dtype, device="meta")):
            record = TensorRecord(sent, str(x.dtype).removeprefix("torch."), tuple(x.shape), offset, 0)
            records.append(record)
            # Aligned, or the next tensor could not be viewed in its own dtype.
            offset = -(-(offset + record.nbytes) // _ALIGN) * _ALIGN
    return records, offset


def allocate(path: Path, size: int, key: str) -> None:
    """Make a file of `size` bytes. key: of the configuration, that names its folder.

    Raises UserError where the folder has no room for it.
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


def read(path: str, records: Sequence[TensorRecord]) -> dict[str, Tensor]:
    """Views [any shape] of the given tensors in the file by name; they stay valid while they are held."""
    memory = mapped(path)
    return {record.name: view(memory, record) for record in records}


def mapped(path: str | Path) -> Tensor:
    """The bytes of the file [size], shared with whoever else maps it."""
    return torch.from_file(str(path), shared=True, size=os.path.getsize(path), dtype=torch.uint8)


def view(memory: Tensor, record: TensorRecord) -> Tensor:
    """The tensor [record.shape] that lies in the bytes of a file [size]."""
    own = memory[record.offset : record.offset + record.nbytes]
    return own.view(getattr(torch, record.dtype)).view(record.shape)
