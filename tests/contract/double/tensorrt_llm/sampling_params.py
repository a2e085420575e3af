"""SamplingParams with the fields of 1.2, and those that 1.3 added."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tensorrt_llm._double import API


class LogprobMode(str, Enum):
    RAW = "raw"
    PROCESSED = "processed"


@dataclass(kw_only=True)
class _SamplingParams12:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    bad: Any = None
    bad_token_ids: list[int] | None = None
    stop: Any = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: Any = None
    logits_processor: Any = None
    apply_batched_logits_processor: bool = False
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    beam_search_diversity_rate: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    min_p: float | None = None
    beam_width_array: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    additional_model_outputs: Any = None
    lookahead_config: Any = None
    guided_decoding: Any = None
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.end_id is None:
            raise ValueError("end_id must be set without a tokenizer")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"require top_k >= 0, got {self.top_k}")
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"require 0 <= top_p <= 1, got {self.top_p}")
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"require temperature >= 0, got {self.temperature}")
        if self.n > 1 and self.greedy and os.environ.get("TLLM_ALLOW_N_GREEDY_DECODING") != "1":
            raise ValueError("greedy decoding allows n = 1 only")

    @property
    def greedy(self) -> bool:
        unset = self.temperature is None and self.top_p is None and self.top_k is None
        return unset or self.temperature == 0 or self.top_k == 1 or self.top_p == 0


@dataclass(kw_only=True)
class _SamplingParams13(_SamplingParams12):
    logprobs_mode: LogprobMode = LogprobMode.RAW
    logprobs_simple_format: bool = False


SamplingParams: Any = {"1.2": _SamplingParams12, "1.3": _SamplingParams13}[API]
