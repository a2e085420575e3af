"""Arguments of LLM and their checks."""

from __future__ import annotations

from enum import Enum

from tensorrt_llm._double import LISTING, Recorded

_MEMBERS = LISTING["members"]
ExecutorMemoryType = Enum("ExecutorMemoryType", _MEMBERS["ExecutorMemoryType"], type=str)
CapacitySchedulerPolicy = Enum(
    "CapacitySchedulerPolicy", {name: name for name in _MEMBERS["CapacitySchedulerPolicy"]}, type=str
)


class SchedulerConfig(Recorded):
    usual = {"capacity_scheduler_policy": CapacitySchedulerPolicy["GUARANTEED_NO_EVICT"]}  # noqa: RUF012


class KvCacheConfig(Recorded):
    usual = {  # noqa: RUF012
        "enable_block_reuse": True,
        "free_gpu_memory_fraction": 0.9,
        "dtype": "auto",
        "tokens_per_block": 32,
        "use_kv_cache_manager_v2": "auto",
    }

    def check(self) -> None:
        if not 0 <= self.free_gpu_memory_fraction <= 1:
            raise ValueError(f"free_gpu_memory_fraction {self.free_gpu_memory_fraction}: must be in [0, 1]")
        if self.max_tokens is not None and self.max_tokens <= 0:
            raise ValueError(f"max_tokens {self.max_tokens}: must be positive")
        if self.use_kv_cache_manager_v2 not in (True, False, "auto"):
            raise ValueError(f"use_kv_cache_manager_v2 {self.use_kv_cache_manager_v2}: a bool or 'auto'")


class CudaGraphConfig(Recorded):
    usual = {"max_batch_size": 0, "enable_padding": False, "mode": "decode"}  # noqa: RUF012

    def check(self) -> None:
        if not self.batch_sizes:
            self.max_batch_size = self.max_batch_size or 128
            return
        greatest = max(self.batch_sizes)
        if self.max_batch_size not in (0, greatest):
            raise ValueError("CudaGraphConfig.max_batch_size is incompatible with CudaGraphConfig.batch_sizes")
        self.max_batch_size = greatest


class RayPlacementConfig(Recorded):
    pass


class SleepConfig(Recorded):
    def check(self) -> None:
        for tag, mode in (self.restore_modes or {}).items():
            ExecutorMemoryType(tag)  # raises ValueError for an unknown tag
            if mode not in ("NONE", "MEMSET", "CPU", "PINNED"):
                raise ValueError(f"restore mode {mode}")


class TorchLlmArgs(Recorded):
    usual = {  # noqa: RUF012
        "skip_tokenizer_init": False,
        "tensor_parallel_size": 1,
        "dtype": "auto",
        "load_format": "auto",
        "max_batch_size": 2048,
        "max_input_len": 1024,
        "max_num_tokens": 8192,
        "disable_overlap_scheduler": False,
    }

    def check(self) -> None:
        self.kv_cache_config = self.kv_cache_config or KvCacheConfig()
        self.scheduler_config = self.scheduler_config or SchedulerConfig()
        if self.ray_worker_extension_cls and self.orchestrator_type != "ray":
            raise ValueError("ray_worker_extension_cls needs orchestrator_type='ray'")
        if self.load_format not in ("auto", "dummy", "vision_only", "gms"):
            raise ValueError(f"load_format {self.load_format}")
