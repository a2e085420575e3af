"""What runs inside every worker of a vLLM engine: loads weights bucket by bucket, and checks what it loads.

Mixed into vLLM's worker by worker_extension_cls, so no name here may be one of the worker's; hence the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from megatron_brorl.rollout.remote.protocol import WorkerBucket
from megatron_brorl.rollout.remote.weights_receive import BucketReader


class VllmWorkerExtension:
    """Methods that AsyncLLM.collective_rpc calls by name."""

    # Of vLLM's worker, which this is mixed into.
    device: torch.device
    vllm_config: Any
    cache_config: Any
    model_runner: Any

    def brorl_begin(self) -> None:
        """A new version of the weights begins."""
        self._brorl_reader = BucketReader(self.device.index or 0)
        self._brorl_loaded: set[str] = set()
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model_runner.get_model())

    def brorl_load(self, bucket: WorkerBucket) -> None:
        """Load a bucket that is what was sent. Raises ValueError as BucketReader.read."""
        tensors = self._brorl_reader.read(bucket)
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            self._brorl_loaded |= set(self.model_runner.get_model().load_weights(tensors.items()) or ())

    def brorl_finish(self, names: Sequence[str]) -> None:
        """Finalise, where exactly `names` were loaded. Raises ValueError as BucketReader.check_complete, and where a
        parameter of the model was sent nothing."""
        self._brorl_reader.check_complete(names)
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            _pack_heads(model)

        # vLLM leaves a parameter that nothing came for as it was; scales of quantised ones are its own.
        if self.vllm_config.model_config.quantization is None:
            unsent = {name for name, _ in model.named_parameters()} - self._brorl_loaded
            if unsent:
                raise ValueError(f"{len(unsent)} parameters of the engine were sent nothing, for example {min(unsent)}")

    def brorl_kv_tokens(self) -> int:
        """Tokens whose keys and values this worker's memory holds."""
        return int(self.cache_config.num_gpu_blocks * self.cache_config.block_size)

    def brorl_tensor(self, name: str) -> list[float]:
        """The values of a parameter by vLLM's name, for tests."""
        found: Tensor = dict(self.model_runner.get_model().named_parameters())[name]
        return [float(x) for x in found.flatten()]


def _pack_heads(model: torch.nn.Module) -> None:
    """Pack the weights of LM heads anew: on CPUs a product reads a packed copy, and that of a head that is tied to the
    embedding stays as it was, because a layerwise reload loads the embedding alone (seen in vLLM 0.32)."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(module)
