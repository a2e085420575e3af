"""Weights as a worker of an engine takes them: bucket by bucket to its device, each tensor checked there."""

from __future__ import annotations

import base64
import math
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_brorl.ops.checksum import checksum
from megatron_brorl.rollout.remote.protocol import WorkerBucket

_DEVICE_ARGUMENT = 6  # of the function that rebuilds a tensor from a CUDA handle (torch.multiprocessing.reductions)


class TensorRecord(NamedTuple):
    """One tensor of an update and its place. A list in JSON."""

    name: str
    dtype: str  # "bfloat16"
    shape: tuple[int, ...]
    offset: int  # in bytes; 0 for a tensor that travels by its handle
    checksum: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


class BucketReader:
    """One version of the weights on its way to one worker."""

    def __init__(self, device_id: int, uuid: str) -> None:
        """device_id: the worker's CUDA device. uuid: of it, as own_device writes it."""
        self.device_id, self.uuid = device_id, uuid
        self.device = torch.device("cuda", device_id) if torch.cuda.is_available() else torch.device("cpu")
        self.seen: set[str] = set()

    def read(self, bucket: WorkerBucket) -> dict[str, Tensor]:
        """Return the tensors of a bucket by Hugging Face name, [any shape], on the worker's device.

        Raises ValueError if a tensor fails its checksum or comes twice. The update is then incomplete, and the engine
        must be restarted.
        """
        given: Any = bucket["records"]
        records = [TensorRecord(*record) for record in given]
        tensors = self._from_host(str(bucket["path"]), records) if "path" in bucket else self._from_handles(bucket)

        for record in records:
            if record.name in self.seen:
                raise ValueError(f"{record.name} came twice")
            if int(checksum(record.name, tensors[record.name])) != record.checksum:
                raise ValueError(f"{record.name} is not what was sent (checksum)")
        self.seen |= tensors.keys()
        return tensors

    def check_complete(self, names: Sequence[str]) -> None:
        """Raise ValueError unless exactly `names` were read, because engines keep old tensors without a word."""
        wrong = self.seen.symmetric_difference(names)
        if wrong:
            raise ValueError(f"{len(wrong)} tensors missing or unknown, for example {min(wrong)}")

    def _from_host(self, path: str, records: Sequence[TensorRecord]) -> dict[str, Tensor]:
        memory = mapped(path)
        return {record.name: view(memory, record).to(self.device) for record in records}

    def _from_handles(self, bucket: WorkerBucket) -> dict[str, Tensor]:
        handles: Any = bucket["handles"]
        tensors = {}
        for name, (rebuild, arguments) in pickle.loads(base64.b64decode(handles[self.uuid])):  # by a private socket
            places = list(arguments)
            places[_DEVICE_ARGUMENT] = self.device_id  # The trainer numbers its devices differently.
            tensors[name] = rebuild(*places)
        return tensors


def mapped(path: str | Path) -> Tensor:
    """Return the bytes of a file [size], shared with every process that maps it."""
    return torch.from_file(str(path), shared=True, size=os.path.getsize(path), dtype=torch.uint8)


def view(memory: Tensor, record: TensorRecord) -> Tensor:
    """Return the tensor [record.shape] in the bytes of a file [size]."""
    own = memory[record.offset : record.offset + record.nbytes]
    return own.view(getattr(torch, record.dtype)).view(record.shape)


def own_device(index: int | None = None) -> str:
    """Return the UUID of a CUDA device of this process, the current one by default; "cpu" without one."""
    if not torch.cuda.is_available():
        return "cpu"
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index).uuid}"
