"""Arguments of LLM: what is unknown is refused, as by pydantic's extra = "forbid"."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tensorrt_llm._double import API
from tensorrt_llm._torch.virtual_memory import ExecutorMemoryType


class CapacitySchedulerPolicy(str, Enum):
    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"


@dataclass(kw_only=True)
class SchedulerConfig:
    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    context_chunking_policy: Any = None
    waiting_queue_policy: str = "fcfs"


@dataclass(kw_only=True)
class KvCacheConfig:
    enable_block_reuse: bool = True
    max_tokens: int | None = None
    max_attention_window: list[int] | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float = 0.9
    host_cache_size: int | None = None
    onboard_blocks: bool = True
    event_buffer_max_size: int = 0
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    use_uvm: bool = False
    max_gpu_total_bytes: int = 0
    dtype: str = "auto"
    tokens_per_block: int = 32

    def __post_init__(self) -> None:
        if not 0 < self.free_gpu_memory_fraction <= 1:
            raise ValueError(f"free_gpu_memory_fraction {self.free_gpu_memory_fraction}: must be in (0, 1]")
        if self.max_tokens is not None and self.max_tokens <= 0:
            raise ValueError(f"max_tokens {self.max_tokens}: must be positive")


@dataclass(kw_only=True)
class CudaGraphConfig:
    batch_sizes: list[int] | None = None
    max_batch_size: int = 0
    enable_padding: bool = False

    def __post_init__(self) -> None:
        if not self.batch_sizes:
            self.max_batch_size = self.max_batch_size or 128
            return
        greatest = max(self.batch_sizes)
        if self.max_batch_size not in (0, greatest):
            raise ValueError("CudaGraphConfig.max_batch_size is incompatible with CudaGraphConfig.batch_sizes")
        self.max_batch_size = greatest


@dataclass(kw_only=True)
class RayPlacementConfig:
    defer_workers_init: bool = False
    placement_groups: list[Any] | None = None
    placement_bundle_indices: list[list[int]] | None = None
    per_worker_gpu_share: float | None = None


if API == "1.3":

    @dataclass(kw_only=True)
    class SleepConfig:
        restore_modes: dict[Any, str] = field(default_factory=dict)

        def __post_init__(self) -> None:
            for tag, mode in self.restore_modes.items():
                ExecutorMemoryType(tag)  # raises ValueError where it is unknown
                if mode not in ("NONE", "MEMSET", "CPU", "PINNED"):
                    raise ValueError(f"restore mode {mode}")


@dataclass(kw_only=True)
class _TorchLlmArgs:
    model: str
    tokenizer: Any = None
    tokenizer_mode: str = "auto"
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    revision: str | None = None
    tokenizer_revision: str | None = None
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    moe_tensor_parallel_size: int | None = None
    moe_expert_parallel_size: int | None = None
    max_batch_size: int | None = None
    max_input_len: int | None = None
    max_seq_len: int | None = None
    max_beam_width: int | None = None
    max_num_tokens: int = 8192
    load_format: str = "auto"
    model_kwargs: dict[str, Any] | None = None
    enable_chunked_prefill: bool = False
    stream_interval: int = 1
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    cuda_graph_config: CudaGraphConfig | None = None
    disable_overlap_scheduler: bool = False
    sampler_type: str = "auto"
    allreduce_strategy: str = "AUTO"
    orchestrator_type: str | None = None
    ray_worker_extension_cls: str | None = None
    ray_placement_config: RayPlacementConfig | None = None
    disable_flashinfer_sampling: bool = False
    enable_iter_perf_stats: bool = False
    print_iter_log: bool = False
    gather_generation_logits: bool = False

    def __post_init__(self) -> None:
        if self.ray_worker_extension_cls and self.orchestrator_type != "ray":
            raise ValueError("ray_worker_extension_cls needs orchestrator_type='ray'")
        if self.load_format not in ("auto", "dummy"):
            raise ValueError(f"load_format {self.load_format}")
        samplers = ["auto", "TorchSampler"] + ["TRTLLMSampler"] * (API == "1.2")
        if self.sampler_type not in samplers:
            raise ValueError(f"sampler_type {self.sampler_type}: one of {samplers}")


@dataclass(kw_only=True)
class _TorchLlmArgs12(_TorchLlmArgs):
    enable_sleep: bool = False

    @property
    def can_sleep(self) -> bool:
        return self.enable_sleep


@dataclass(kw_only=True)
class _TorchLlmArgs13(_TorchLlmArgs):
    sleep_config: Any = None

    @property
    def can_sleep(self) -> bool:
        return self.sleep_config is not None


TorchLlmArgs: Any = {"1.2": _TorchLlmArgs12, "1.3": _TorchLlmArgs13}[API]
