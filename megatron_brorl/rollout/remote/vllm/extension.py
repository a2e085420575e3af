"""Worker extension of vLLM: loads weights bucket by bucket and checks them.

vLLM adds it as a base class of its worker (worker_extension_cls). The prefix avoids clashes with the worker's names.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from megatron_brorl.rollout.remote.protocol import WorkerBucket
from megatron_brorl.rollout.remote.weights_in_worker import read_bucket


class VllmWorkerExtension:
    """Methods that VllmBackend calls in every worker by AsyncLLM.collective_rpc."""

    # Attributes of vLLM's worker.
    device: torch.device
    vllm_config: Any
    cache_config: Any
    model_runner: Any

    def brorl_begin(self) -> None:
        """Start loading a new version of the weights."""
        self._brorl_loaded: set[str] = set()
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
        if self.device.type == "cpu":
            _drop_expert_kernels(model)

    def brorl_load(self, bucket: WorkerBucket) -> None:
        """Load a bucket. Raises ValueError if a tensor fails its checksum."""
        tensors = read_bucket(bucket, self.device.index or 0)
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            self._brorl_loaded |= set(self.model_runner.get_model().load_weights(tensors.items()) or ())

    def brorl_finish(self) -> None:
        """Finish loading. Raises ValueError unless all parameters of the model were loaded."""
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            _pack_heads(model)

        # vLLM silently keeps parameters that were not sent. With quantization it has parameters of its own for scales.
        if self.vllm_config.model_config.quantization is None:
            unsent = {name for name, _ in model.named_parameters()} - self._brorl_loaded
            if unsent:
                raise ValueError(f"{len(unsent)} parameters of the engine were not sent, for example {min(unsent)}")

    def brorl_kv_tokens(self) -> int:
        """Return the number of tokens whose keys and values fit in this worker's memory."""
        return int(self.cache_config.num_gpu_blocks * self.cache_config.block_size)


def _drop_expert_kernels(model: torch.nn.Module) -> None:
    """Make vLLM build the kernels of experts again when their weights are loaded.

    On CPUs the kernel reads packed weights, and vLLM 0.32 packs them only when it builds the kernel. Otherwise a reload
    would put unpacked weights in their place.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if hasattr(method, "moe_kernel"):
            method.moe_kernel = None


def _pack_heads(model: torch.nn.Module) -> None:
    """Repack the weights of LM heads, from which matmuls on CPUs read.

    A layerwise reload loads only the embedding of tied weights, so that the head's packed copy is stale (vLLM 0.32).
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(module)
