"""ServerArgs and SamplingParams: the fields that a trainer may meet, of their types, with their refusals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sglang._strict import Strict

TOP_K_ALL = 1 << 30
_CHOICES = {
    "dtype": ("auto", "half", "float16", "bfloat16", "float", "float32"),
    "kv_cache_dtype": ("auto", "fp8_e5m2", "fp8_e4m3", "mxfp8", "bf16", "bfloat16", "nvfp4", "fp4_mx_block16"),
    "load_format": ("auto", "safetensors", "dummy"),
    "sampling_backend": (None, "flashinfer", "pytorch"),
}


@dataclass(kw_only=True)
class ServerArgs(Strict):
    model_path: str
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    load_format: str = "auto"
    custom_weight_loader: list[str] | None = None
    context_length: int | None = None
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    tp_size: int = 1
    mem_fraction_static: float | None = None
    max_running_requests: int | None = None
    max_total_tokens: int | None = None
    chunked_prefill_size: int | None = None
    disable_radix_cache: bool = False
    disable_cuda_graph: bool = False
    sampling_backend: str | None = None
    enable_deterministic_inference: bool = False
    enable_memory_saver: bool = False
    random_seed: int | None = None
    log_level: str = "info"

    def __post_init__(self) -> None:
        self.check()
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not one of {choices}")
        if self.mem_fraction_static is not None and not 0 < self.mem_fraction_static < 1:
            raise ValueError(f"mem_fraction_static {self.mem_fraction_static}")


@dataclass(kw_only=True)
class SamplingParams(Strict):
    max_new_tokens: int | None = 128
    stop: Any = None
    stop_token_ids: set[int] | None = None
    stop_regex: Any = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = TOP_K_ALL
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    n: int = 1
    beam_width: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int | None = None
    logit_bias: dict | None = None
    sampling_seed: int | None = None
    custom_params: dict | None = None

    def __post_init__(self) -> None:
        self.check()
        if 0 <= self.temperature < 1e-6:
            self.temperature, self.top_k = 1.0, 1  # greedy
        if self.top_k == -1:
            self.top_k = TOP_K_ALL

    def verify(self) -> None:
        """Raises ValueError where a value is out of bounds, or needs a tokenizer."""
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise ValueError(f"temperature must be a non-negative finite number, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 1:
            raise ValueError(f"top_k must be -1 (disable) or at least 1, got {self.top_k}")
        if self.max_new_tokens is not None and self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be at least 0, got {self.max_new_tokens}")
        if self.sampling_seed is not None and not -(2**63) <= self.sampling_seed < 2**63:
            raise ValueError(f"sampling_seed must be in [-2**63, 2**63 - 1], got {self.sampling_seed}")
        if self.stop or self.stop_regex or self.min_new_tokens:
            raise ValueError("unavailable when skip_tokenizer_init=True")
