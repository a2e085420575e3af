"""Shared helpers: tiny random Hugging Face models of each family, and processes over gloo."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors; several processes share the cores
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import sys
from pathlib import Path

from megatron_brorl.parallel import device

device.leave_out_compiler()
sys.path.insert(0, str(Path(__file__).parent))
