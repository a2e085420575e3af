"""The keys of section [engine]: rollout engines in processes of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_brorl.config.bounds import above, at_least, within


@dataclass(frozen=True)
class EngineConfig:
    """The engine processes of rollout.engine = "vllm" or "trtllm". The built-in engine has no such process."""

    python: str = ""  # Interpreter of the environment that has the engine; "" = the one that runs the trainer.
    # Tensor-parallel size of an engine: so many neighbouring ranks of a node share it.
    tensor: int = at_least(1, default=1)
    # Share of the GPU memory. vLLM: of all memory, for weights, keys and values. TensorRT-LLM: of what the trainer and
    # the engine's weights leave, for keys and values.
    memory_fraction: float = within("(0, 1)", default=0.85)
    kv_dtype: Literal["auto", "fp8"] = "auto"  # Type of keys and values; "auto": rollout.dtype.
    # Type of the weights. "fp8": vLLM quantizes them as they arrive; for TensorRT-LLM the trainer sends FP8 with a
    # scale per 128 x 128 block. "none": rollout.dtype.
    quantization: Literal["none", "fp8"] = "none"
    max_num_tokens: int = at_least(1, default=8192)  # Tokens that an engine computes in one step, at most.
    cuda_graphs: bool = True  # CUDA graphs (and compilation in vLLM) on a GPU.
    # How weights reach the engine. "auto": CUDA IPC where trainer and engine have the same torch and share one GPU,
    # host memory elsewhere.
    transport: Literal["auto", "cuda_ipc", "host"] = "auto"
    # Folder in memory that holds the weights: one copy per node, two during an update.
    shared_memory: str = "/dev/shm"
    start_timeout_s: float = above(0, default=1200.0)  # Seconds until a new process answers.
    # Seconds without a sign of life, or within one part of a weight update, after which a process is restarted. It must
    # be longer than the engine's longest step.
    heartbeat_timeout_s: float = at_least(5, default=60.0, why=": an engine process reports twice a second")
    # Restarts without a completed call of generate in between, after which the run ends.
    max_restarts: int = at_least(0, default=3)
