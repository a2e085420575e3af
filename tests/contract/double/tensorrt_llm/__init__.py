"""A contract double of TensorRT-LLM: its signatures and strictness, with a CPU engine behind them. For tests alone.

Names and arguments are those of tests/contract/listings/tensorrt_llm_1_3.json, which is recorded from public sources.
BRORL_DOUBLE_VERSION: the release that it says it is. BRORL_DOUBLE_KV_TOKENS: tokens that there is room for.
BRORL_DOUBLE_DIE=POINT:NUMBER:FILE ends the process by SIGKILL
the NUMBERth time that it comes to POINT (load, finish, row, sleep), once; it makes FILE.

What is not modelled: speed, memory, CUDA graphs, real tensor parallelism (every worker has the whole model).
"""

from __future__ import annotations

import torch

from tensorrt_llm._double import VERSION
from tensorrt_llm._torch.async_llm import AsyncLLM
from tensorrt_llm.sampling_params import SamplingParams

torch.set_num_threads(1)  # an engine is started without the OMP_NUM_THREADS of its trainer; tests share few cores

__version__ = VERSION
__all__ = ["AsyncLLM", "SamplingParams"]
