"""Worker extension of TensorRT-LLM: loads weights bucket by bucket and checks them.

TensorRT-LLM adds it as a base class of its worker (ray_worker_extension_cls), so no name may clash with the worker's;
hence the prefix. Not yet run on a GPU; tests run it on a fake tensorrt_llm (tests/contract/double).
"""

from __future__ import annotations

from tensorrt_llm._torch.pyexecutor.resource_manager import ResourceManagerType
from tensorrt_llm._torch.utils import get_device_uuid
from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension

from megatron_brorl.rollout.remote.protocol import WorkerBucket
from megatron_brorl.rollout.remote.weights_in_worker import read_bucket


class TrtllmWorkerExtension(WorkerExtension):
    """Methods that TrtllmBackend calls in every worker by AsyncLLM.collective_rpc."""

    def brorl_load(self, bucket: WorkerBucket) -> None:
        """Load a bucket. Raises ValueError if a tensor fails its checksum."""
        tensors = read_bucket(bucket, self.device_id)

        # TensorRT-LLM expects CUDA IPC handles (function, arguments), and replaces the seventh argument by the device.
        # These handles return the tensors that this worker already has.
        handles = [(name, (lambda tensor, *_: tensor, (tensor, *[None] * 6))) for name, tensor in tensors.items()]
        self.update_weights({get_device_uuid(self.device_id): handles})

    def brorl_finish(self) -> None:
        self.update_weights(None)

    def brorl_reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()

    def brorl_kv_tokens(self) -> int:
        """Return the number of tokens whose keys and values fit in this worker's memory.

        It needs the first KV cache manager, which llm.py selects.
        """
        manager = self.engine.resource_manager.get_resource_manager(ResourceManagerType.KV_CACHE_MANAGER)
        stats = manager.get_kv_cache_stats()
        return int(stats.max_num_blocks * stats.tokens_per_block)
