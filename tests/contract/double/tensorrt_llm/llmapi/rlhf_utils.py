"""TensorRT-LLM's default worker extension, as permissive as the real one."""

from __future__ import annotations

import base64
import pickle
from typing import Any

from tensorrt_llm._ray_utils import control_action_decorator
from tensorrt_llm._torch.utils import get_device_uuid


class WorkerExtension:
    engine: Any
    device_id: int

    @control_action_decorator
    def update_weights(self, ipc_handles: dict[str, Any] | None = None) -> None:
        """Load a bucket, or finish loading if it is None. Not atomic; ignores missing and unknown names."""
        if ipc_handles is None:
            self.engine.model_engine.model.post_load_weights()
            self.engine.reset_prefix_cache()
            return
        uuid = get_device_uuid(self.device_id)
        if uuid not in ipc_handles:
            raise ValueError(f"Device UUID {uuid} not found in ipc_handles")
        handles = ipc_handles[uuid]
        if isinstance(handles, str):
            handles = pickle.loads(base64.b64decode(handles))
        weights = {}
        for name, (rebuild, args) in handles:
            rebuild_args = list(args)
            rebuild_args[6] = self.device_id  # argument storage_device of torch's rebuild_cuda_tensor
            weights[name] = rebuild(*rebuild_args)
        loader = self.engine.model_engine.model_loader
        loader.reload(self.engine.model_engine.model, weights, allow_partial_loading=True)
