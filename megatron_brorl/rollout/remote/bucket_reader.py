"""Weights as a worker of an engine takes them: bucket by bucket to its device, each tensor checked there."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_brorl.ops.checksum import checksum
from megatron_brorl.rollout.remote.options import WorkerBucket
from megatron_brorl.rollout.remote.shared_weights import TensorRecord, read

_DEVICE_ARGUMENT = 6  # of the function that rebuilds a tensor from a CUDA handle (torch.multiprocessing.reductions)


class BucketReader:
    """One version of the weights on its way to one worker."""

    def __init__(self, device_id: int, uuid: str) -> None:
        """device_id: the worker's CUDA device. uuid: of it, as cuda_ipc.own_device writes it."""
        self.device_id, self.uuid = device_id, uuid
        self.device = torch.device("cuda", device_id) if torch.cuda.is_available() else torch.device("cpu")
        self.seen: set[str] = set()

    def read(self, bucket: WorkerBucket) -> dict[str, Tensor]:
        """The tensors of a bucket by Hugging Face name, [any shape], on the worker's device.

        Raises ValueError where a tensor is not what was sent, or comes twice. The update is then half done: the engine
        must be started again.
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
        """Raises ValueError unless exactly `names` were read. Engines leave what they were not sent as it was."""
        wrong = self.seen.symmetric_difference(names)
        if wrong:
            raise ValueError(f"{len(wrong)} tensors missing or unknown, for example {min(wrong)}")

    def _from_host(self, path: str, records: Sequence[TensorRecord]) -> dict[str, Tensor]:
        return {name: x.to(self.device) for name, x in read(path, records).items()}

    def _from_handles(self, bucket: WorkerBucket) -> dict[str, Tensor]:
        handles: Any = bucket["handles"]
        tensors = {}
        for name, (rebuild, arguments) in pickle.loads(base64.b64decode(handles[self.uuid])):  # by a private socket
            places = list(arguments)
            places[_DEVICE_ARGUMENT] = self.device_id  # the trainer counts its devices otherwise
            tensors[name] = rebuild(*places)
        return tensors
