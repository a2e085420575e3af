"""Weights to the engine on the same GPU by CUDA IPC: handles travel, bytes do not. Not yet run on a GPU.

The handles are pickled tuples of torch's own, so both processes must have the same torch.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from megatron_brorl.ops.checksum import checksum
from megatron_brorl.rollout.remote.options import WorkerBucket
from megatron_brorl.rollout.remote.shared_weights import BUCKET_BYTES, TensorRecord


class IpcSender:
    """Copies of the tensors that pass, sent bucket by bucket."""

    def __init__(
        self,
        device: str,
        send: Callable[[WorkerBucket], None],
        form: Callable[[str, Tensor], Iterator[tuple[str, Tensor]]],
        limit: int = BUCKET_BYTES,
        reduce: Callable[[Tensor], Any] = reduce_tensor,
    ) -> None:
        """device: UUID of the engine's. send: returns when a bucket was loaded. form: what the engine is sent for a
        tensor. limit: bytes of a bucket. reduce: tensor -> (function, arguments) that rebuild it elsewhere."""
        self.device, self.send, self.form, self.limit, self.reduce = device, send, form, limit, reduce
        self.names: list[str] = []
        self.failed = False  # `send` raised; nothing more is sent then

    def tee(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass a stream of (name, tensor [any shape]) on, and send it on the way. It is passed on to its end whatever
        the engine does, because other ranks take part in it."""
        bucket: list[tuple[str, Tensor]] = []
        for pair in tensors:
            for name, tensor in self.form(*pair):
                # A copy, because the stream's tensors are views of buffers that are used again.
                bucket.append((name, tensor.detach().clone()))
            if sum(x.nbytes for _, x in bucket) >= self.limit:
                self._flush(bucket)
            yield pair
        self._flush(bucket)

    def _flush(self, bucket: list[tuple[str, Tensor]]) -> None:
        """The copies are held until the engine has loaded them."""
        if not bucket or self.failed:
            bucket.clear()
            return
        handles = [(name, self.reduce(x)) for name, x in bucket]
        records = [
            TensorRecord(name, str(x.dtype).removeprefix("torch."), tuple(x.shape), 0, int(checksum(name, x)))
            for name, x in bucket
        ]
        try:
            self.send({"handles": {self.device: base64.b64encode(pickle.dumps(handles)).decode()}, "records": records})
        except RuntimeError:  # the weights are sent again as a whole, by another way
            self.failed = True
        self.names += [name for name, _ in bucket]
        bucket.clear()


def own_device(index: int | None = None) -> str:
    """UUID of a CUDA device of this process, as nvidia-smi writes it, the current one by default; "cpu" without one."""
    if not torch.cuda.is_available():
        return "cpu"
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index).uuid}"
