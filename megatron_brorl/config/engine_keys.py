"""The keys of [trtllm] and [vllm]: engines in processes of their own.

All have the keys of rollout.remote.options.ProcessSettings; the rest is read by the engine's leaf alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_brorl.config.bounds import above, at_least, within


@dataclass(frozen=True)
class TrtLlmConfig:
    """TensorRT-LLM engines, each a process in an environment of its own; read where rollout.engine = "trtllm"."""

    python: str = ""  # interpreter of the environment that has tensorrt_llm and ray; "" = the one that runs the trainer
    # Tensor-parallel size of an engine, which so many neighbouring ranks of a node share
    tensor: int = at_least(1, default=1)
    # For keys and values, of the GPU memory that trainer and the engine's weights leave while engines generate
    memory_fraction: float = within("(0, 1)", default=0.85)
    kv_dtype: Literal["auto", "fp8"] = "auto"  # of keys and values; auto: that of the model
    quantization: Literal["none", "fp8_block"] = "none"  # of weights: one scale per 128 x 128 block, or rollout.dtype
    max_num_tokens: int = at_least(1, default=8192)  # that an engine computes at a time
    cuda_graphs: bool = True  # of decoding, for a list of batch sizes up to the rows of an engine; others are padded
    # Which requests run. GUARANTEED_NO_EVICT: those whose longest responses fit together. MAX_UTILIZATION: as many as
    # fit now; some are thrown out and computed again when they grow, which cost 40% of the throughput where far more
    # was asked for than fits (TensorRT-LLM issue 16827).
    scheduler: Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"] = "GUARANTEED_NO_EVICT"
    overlap: bool = True  # a step is scheduled while the GPU computes the one before
    # Each engine's Ray takes the first block of 100 free ports from here on. From 32768 on Linux gives ports to whoever
    # asks for any.
    ray_port: int = within("[1024, 60000]", default=20000)
    # How weights reach the engine. auto: CUDA IPC where both have one torch and share one GPU, host memory elsewhere.
    transport: Literal["auto", "cuda_ipc", "host"] = "auto"
    shared_memory: str = "/dev/shm"  # folder in memory; holds the weights once per node, twice during an update
    start_timeout_s: float = above(0, default=1200.0)  # seconds until a process answers first
    # A process that is silent for so many seconds, or takes longer for a part of a refit, is started again
    heartbeat_timeout_s: float = at_least(5, default=60.0, why=": an engine process reports twice a second")
    max_restarts: int = at_least(
        0, default=3
    )  # starts of a process without a call of generate in between; then the run ends


@dataclass(frozen=True)
class VllmConfig:
    """vLLM engines, each a process in an environment of its own; read where rollout.engine = "vllm"."""

    python: str = ""  # interpreter of the environment that has vllm; "" = the one that runs the trainer
    # Tensor-parallel size of an engine, which so many neighbouring ranks of a node share
    tensor: int = at_least(1, default=1)
    # For weights, keys and values, of the GPU's whole memory; for keys and values no more than the plan has room for
    memory_fraction: float = within("(0, 1)", default=0.85)
    kv_dtype: Literal["auto", "fp8"] = "auto"  # of keys and values; auto: that of the model
    quantization: Literal["none", "fp8"] = "none"  # of weights, by the engine itself as they come; on a GPU
    max_num_tokens: int = at_least(1, default=8192)  # that an engine computes at a time
    cuda_graphs: bool = True  # on a GPU, with what the engine compiles; off: as PyTorch runs it
    # How weights reach the engine. auto: CUDA IPC where both have one torch and share one GPU, host memory elsewhere.
    transport: Literal["auto", "cuda_ipc", "host"] = "auto"
    shared_memory: str = "/dev/shm"  # folder in memory; holds the weights once per node, twice during an update
    start_timeout_s: float = above(0, default=1200.0)  # seconds until a process answers first
    # A process that is silent for so many seconds, or takes longer for a part of a refit, is started again, as is one
    # whose core or worker is silent: more than the engine's longest step takes
    heartbeat_timeout_s: float = at_least(5, default=60.0, why=": an engine process reports twice a second")
    max_restarts: int = at_least(
        0, default=3
    )  # starts of a process without a call of generate in between; then the run ends
