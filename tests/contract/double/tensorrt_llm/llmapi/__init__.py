from __future__ import annotations

from tensorrt_llm.llmapi.llm_args import CapacitySchedulerPolicy, CudaGraphConfig, KvCacheConfig, SchedulerConfig

__all__ = ["CapacitySchedulerPolicy", "CudaGraphConfig", "KvCacheConfig", "SchedulerConfig"]
