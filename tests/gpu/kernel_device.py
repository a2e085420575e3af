"""The device for tests of CUDA kernels: a GPU, or the emulated device of tests/emulation."""

from __future__ import annotations

import os

import pytest
import torch
from emulation import build

from megatron_brorl.ops.fused import native

EMULATED = build.ENVIRONMENT_VARIABLE in os.environ
DEVICE = build.DEVICE if EMULATED else "cuda"
if EMULATED:
    build.load()
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not EMULATED and not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not EMULATED and not native.CUDA, reason="the extension was built with BRORL_CUDA=0"),
]
