"""What runs inside every worker of a TensorRT-LLM engine: loads weights bucket by bucket, and checks what it loads.

Mixed into TensorRT-LLM's worker by ray_worker_extension_cls, so no name here may be one of the worker's; hence the
prefix. Not yet run on a GPU; tests run it in the contract double.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from tensorrt_llm._torch.utils import get_device_uuid
from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension
from torch import Tensor

from megatron_brorl.ops.checksum import checksum
from megatron_brorl.rollout.remote.options import WorkerBucket
from megatron_brorl.rollout.remote.shared_weights import read


class BrorlExtension(WorkerExtension):
    """Methods that AsyncLLM.collective_rpc calls by name."""

    def brorl_begin(self) -> None:
        """A new version of the weights begins."""
        self._brorl_seen: set[str] = set()

    def brorl_load(self, bucket: WorkerBucket) -> None:
        """Take a bucket to this worker's device, compare its checksums there and load it.

        Raises ValueError where a tensor is not what was sent, or comes twice. The update is then half done: the engine
        must be started again.
        """
        rows: Any = bucket["rows"]
        tensors = self._brorl_tensors(bucket)
        for name, _, _, _, expected in rows:
            if name in self._brorl_seen:
                raise ValueError(f"{name} came twice")
            if int(checksum(name, tensors[name])) != expected:
                raise ValueError(f"{name} is not what was sent (checksum)")
        # Tensors that are here already, in the form in which TensorRT-LLM takes handles: (function, arguments), of
        # which it replaces the seventh by the device.
        handles = [(name, (_held, (tensor, *[None] * 6))) for name, tensor in tensors.items()]
        self.update_weights({get_device_uuid(self.device_id): handles})
        self._brorl_seen |= tensors.keys()

    def brorl_finish(self, names: Sequence[str]) -> None:
        """Check that exactly `names` were loaded, and finalise. Raises ValueError naming what is missing.

        TensorRT-LLM leaves a tensor that it was not sent as it was, without a word.
        """
        wrong = self._brorl_seen.symmetric_difference(names)
        if wrong:
            raise ValueError(f"{len(wrong)} tensors missing or unknown, for example {min(wrong)}")
        self.update_weights(None)

    def brorl_reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()

    def brorl_reseed(self, seed: int) -> None:
        """Seed the generator of a sampler that takes no seed per request."""
        self.engine.sampler._generator.manual_seed(seed)

    def brorl_device(self) -> str:
        return get_device_uuid(self.device_id)

    def _brorl_tensors(self, bucket: WorkerBucket) -> dict[str, Tensor]:
        device = torch.device("cuda", self.device_id) if torch.cuda.is_available() else torch.device("cpu")
        if "path" in bucket:
            path, rows = str(bucket["path"]), bucket["rows"]
            return {name: x.to(device) for name, x in read(path, rows).items()}  # type: ignore[arg-type]
        handles: Any = bucket["handles"]
        own = handles[get_device_uuid(self.device_id)]
        tensors = {}
        for name, (rebuild, arguments) in pickle.loads(base64.b64decode(own)):  # from our trainer, by a private socket
            places = list(arguments)
            places[6] = self.device_id
            tensors[name] = rebuild(*places)
        return tensors


def _held(tensor: Tensor, *_: object) -> Tensor:
    return tensor
