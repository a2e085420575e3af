"""The weights of an update in an engine's worker, which copies them to its device, bucket by bucket."""

from __future__ import annotations

import functools
import math
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_brorl.ops.checksum import checksum
from megatron_brorl.rollout.remote.protocol import WorkerBucket


class TensorRecord(NamedTuple):
    """One tensor of an update and its position in the file. It is a list in JSON."""

    name: str
    dtype: str  # for example "bfloat16"
    shape: tuple[int, ...]
    offset: int  # in bytes
    checksum: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


def read_bucket(bucket: WorkerBucket, device_id: int) -> dict[str, Tensor]:
    """Return the tensors of a bucket by Hugging Face name, [any shape], on the worker's device.

    device_id: the worker's CUDA device; without CUDA, tensors stay on the CPU. Raises ValueError if a tensor fails its
    checksum. The engine must then be restarted.
    """
    device = torch.device("cuda", device_id) if torch.cuda.is_available() else torch.device("cpu")
    lists: Any = bucket["records"]
    records = [TensorRecord(*fields) for fields in lists]
    memory = map_file(str(bucket["path"]))
    tensors = {record.name: tensor_at(memory, record).to(device) for record in records}
    for record in records:
        if int(checksum(record.name, tensors[record.name])) != record.checksum:
            raise ValueError(f"{record.name} does not match its checksum")
    return tensors


@functools.cache  # Mapping and registering a file take longer than copying its tensors.
def map_file(path: str) -> Tensor:
    """Map a file until this process ends. Return its bytes [size], shared with all processes that map it.

    With CUDA the memory is registered (pinned, for all devices), because copies of pageable memory are slower.
    """
    memory = torch.from_file(path, shared=True, size=os.path.getsize(path), dtype=torch.uint8)
    if torch.cuda.is_available():
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), len(memory), 1))  # 1: portable
    return memory


def tensor_at(memory: Tensor, record: TensorRecord) -> Tensor:
    """Return the tensor [record.shape] in a mapped file [size]."""
    data = memory[record.offset : record.offset + record.nbytes]
    return data.view(getattr(torch, record.dtype)).view(record.shape)
