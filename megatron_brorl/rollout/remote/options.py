"""What an engine process is started with and what it answers: plain values, the same on both sides of the socket."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WorkerBucket = dict[str, object]  # {"path", "rows"} in host memory, or {"handles", "rows"} by CUDA IPC


@dataclass(frozen=True)
class EngineOptions:
    """Arguments of the engine process; see config.TrtLlmConfig and config.RolloutConfig for those with a key there."""

    model: str  # Hugging Face directory; its config.json alone is read
    vocab: int
    context: int  # prompt + response tokens at most
    dtype: str  # "bfloat16", or "float32" in tests on a CPU
    max_rows: int
    stop_ids: tuple[int, ...]
    tensor: int
    sampler: Literal["auto", "TRTLLMSampler", "TorchSampler"]
    quantization: Literal["none", "fp8_block"]
    kv_dtype: Literal["auto", "fp8"]
    memory_fraction: float
    max_num_tokens: int
    cuda_graphs: bool


@dataclass(frozen=True)
class Capabilities:
    """What this build of TensorRT-LLM does, found out when an engine starts (rollout.remote.trtllm.llm)."""

    tensorrt_llm: str  # version
    torch: str  # version
    api: Literal["1.2", "1.3"]  # generation: enable_sleep, or sleep_config
    sampler: str
    seeds: Literal["request", "generator"]  # a request's seed counts, or only that of the engine's one generator
    log_probs: Literal["processed", "tempered", "raw"]  # after temperature and cuts; after temperature; of the model
    log_probs_value: int  # SamplingParams.logprobs with which the sampled token's is among them
    fp8_refit: bool
    weights_tag: str  # of sleep and wake
    devices: tuple[str, ...]  # UUID of each worker's


def log_prob_limits(c: Capabilities, temperature: float, top_p: float, top_k: int) -> str:
    """Why log-probs under this sampling distribution cannot be had, or "" where they can.

    Where few tokens survive top_k, their log-probs are all reported and are renormalised (trtllm.log_probs).
    """
    if temperature == 0 or c.log_probs == "processed" or top_k > 0 or (temperature == 1 and top_p == 1):
        return ""
    if c.log_probs == "tempered":
        return "" if top_p == 1 else "reports log-probs before top-p"
    return "reports log-probs of the model before temperature and top-p"
