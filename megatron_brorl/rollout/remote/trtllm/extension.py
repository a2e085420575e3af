"""What runs inside every worker of a TensorRT-LLM engine: loads weights bucket by bucket, and checks what it loads.

Mixed into TensorRT-LLM's worker by ray_worker_extension_cls, so no name here may be one of the worker's; hence the
prefix. Not yet run on a GPU; tests run it in the contract double.
"""

from __future__ import annotations

from collections.abc import Sequence

from tensorrt_llm._torch.pyexecutor.resource_manager import ResourceManagerType
from tensorrt_llm._torch.utils import get_device_uuid
from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension
from torch import Tensor

from megatron_brorl.rollout.remote.protocol import WorkerBucket
from megatron_brorl.rollout.remote.weights_receive import BucketReader


class TrtllmWorkerExtension(WorkerExtension):
    """Methods that AsyncLLM.collective_rpc calls by name."""

    def brorl_begin(self) -> None:
        """A new version of the weights begins."""
        self._brorl_reader = BucketReader(self.device_id)

    def brorl_load(self, bucket: WorkerBucket) -> None:
        """Load a bucket that is what was sent. Raises ValueError as BucketReader.read."""
        tensors = self._brorl_reader.read(bucket)

        # Tensors that are here already, in the form in which TensorRT-LLM takes handles: (function, arguments), of
        # which it replaces the seventh by the device.
        handles = [(name, (_held, (tensor, *[None] * 6))) for name, tensor in tensors.items()]
        self.update_weights({get_device_uuid(self.device_id): handles})

    def brorl_finish(self, names: Sequence[str]) -> None:
        """Finalise, where exactly `names` were loaded. Raises ValueError as BucketReader.check_complete."""
        self._brorl_reader.check_complete(names)
        self.update_weights(None)

    def brorl_reset_prefix_cache(self) -> None:
        """Forget keys and values of prompts."""
        self.engine.reset_prefix_cache()

    def brorl_kv_tokens(self) -> int:
        """Tokens whose keys and values this worker's memory holds, by the first manager (llm.py asks for it)."""
        manager = self.engine.resource_manager.get_resource_manager(ResourceManagerType.KV_CACHE_MANAGER)
        stats = manager.get_kv_cache_stats()
        return int(stats.max_num_blocks * stats.tokens_per_block)


def _held(tensor: Tensor, *_: object) -> Tensor:
    return tensor
