"""The weights of one version in shared host memory: written once by a trainer rank, read by its engine's workers.

The file outlives the engine process, so that a new one gets the same weights without asking the trainer's ranks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_brorl.errors import UserError
from megatron_brorl.ops.checksum import checksum

BUCKET_BYTES = 256 << 20  # of tensors that a worker loads at a time
SCALE = "_scale_inv"  # ends the name of the scales of the weight before it
_ALIGN = 64  # bytes between the starts of two tensors
Row = tuple[str, str, tuple[int, ...], int, int]  # (name, dtype, shape, offset in bytes, checksum)


@dataclass(frozen=True)
class HostWeights:
    """A file in memory and what lies where."""

    path: Path
    version: int
    rows: tuple[Row, ...]

    def buckets(self, limit: int = BUCKET_BYTES) -> Iterator[list[Row]]:
        """Consecutive rows of at most `limit` bytes together; a larger one comes alone, scales with their weight."""
        bucket: list[Row] = []
        size = 0
        for row in self.rows:
            own = _bytes(row)
            if bucket and size + own > limit and not row[0].endswith(SCALE):
                yield bucket
                bucket, size = [], 0
            bucket.append(row)
            size += own
        if bucket:
            yield bucket

    def delete(self) -> None:
        self.path.unlink(missing_ok=True)


def write(path: Path, tensors: Iterable[tuple[str, Tensor]], version: int, size: int) -> HostWeights:
    """Put tensors that take `size` bytes at most (see `room`) into a new file.

    Raises UserError where the folder has no room for them.
    """
    try:
        # Touching a page of a mapped file that the folder has no room for would end the process by a signal.
        with open(path, "xb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as e:
        path.unlink(missing_ok=True)
        raise UserError(
            f"trtllm.shared_memory: {path.parent} has no room for {size / 2**20:.0f} MiB of weights ({e.strerror}): "
            "enlarge it (docker run --shm-size) or name another folder in memory"
        ) from None
    memory = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    rows: list[Row] = []
    offset = 0
    for name, tensor in tensors:
        row = (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset, 0)
        view = _view(memory, row)
        view.copy_(tensor)
        rows.append((*row[:4], int(checksum(name, view))))
        offset = -(-(offset + _bytes(row)) // _ALIGN) * _ALIGN
    os.truncate(path, offset)
    return HostWeights(path, version, tuple(rows))


def read(path: str, rows: Sequence[Row]) -> dict[str, Tensor]:
    """Views of the given tensors in the file; they stay valid while they are held."""
    memory = torch.from_file(path, shared=True, size=os.path.getsize(path), dtype=torch.uint8)
    return {row[0]: _view(memory, row) for row in rows}


def room(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> int:
    """Bytes that tensors of these shapes take; quantised they take less."""
    return sum(math.prod(s) * dtype.itemsize + 2 * _ALIGN for s in shapes.values())


def _bytes(row: Row) -> int:
    return math.prod(row[2]) * getattr(torch, row[1]).itemsize


def _view(memory: Tensor, row: Row) -> Tensor:
    _, dtype, shape, offset, _ = row
    return memory[offset : offset + _bytes(row)].view(getattr(torch, dtype)).view(shape)
