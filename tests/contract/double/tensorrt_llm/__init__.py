"""A fake TensorRT-LLM for tests, with the signatures and checks of the real one and a CPU engine.

Names and arguments are those of tests/contract/listings/tensorrt_llm_1_3.json, which is recorded from public sources.
BRORL_DOUBLE_VERSION: its version. BRORL_DOUBLE_KV_TOKENS: size of the KV cache in tokens. BRORL_DOUBLE_DIE: see
dying.py; the points are load, finish, row and sleep.

It does not model speed, memory, CUDA graphs and tensor parallelism (every worker has the whole model).
"""

from __future__ import annotations

import torch

from tensorrt_llm._double import VERSION
from tensorrt_llm._torch.async_llm import AsyncLLM
from tensorrt_llm.sampling_params import SamplingParams

torch.set_num_threads(1)  # engines do not inherit OMP_NUM_THREADS, and tests share few cores

__version__ = VERSION
__all__ = ["AsyncLLM", "SamplingParams"]
