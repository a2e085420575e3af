"""SamplingParams and its checks."""

from __future__ import annotations

import os
from enum import Enum

from tensorrt_llm._double import LISTING, Recorded

LogprobMode = Enum("LogprobMode", {name: name.lower() for name in LISTING["members"]["LogprobMode"]}, type=str)


class SamplingParams(Recorded):
    usual = {  # noqa: RUF012
        "max_tokens": 32,
        "n": 1,
        "logprobs_mode": LogprobMode["RAW"],
        "include_stop_str_in_output": False,
        "detokenize": True,
        "add_special_tokens": True,
    }
    refusal = TypeError

    def check(self) -> None:
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
