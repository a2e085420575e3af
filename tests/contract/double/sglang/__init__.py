"""A contract double of SGLang 0.5.23: its signatures and refusals, with a CPU engine behind them. For tests alone.

BRORL_DOUBLE_KV_TOKENS: tokens that there is room for. BRORL_DOUBLE_SEEDS=0: seeds are ignored, as without
enable_deterministic_inference. BRORL_DOUBLE_DIE: see dying.py; points load, end, row, sleep.

What is not modelled: speed, memory, CUDA graphs, tensor parallelism, stop strings, quantisation.
"""

from __future__ import annotations

import torch

from sglang._engine import Engine

torch.set_num_threads(1)  # an engine is started without the OMP_NUM_THREADS of its trainer; tests share few cores

__version__ = "0.5.23"
__all__ = ["Engine"]
