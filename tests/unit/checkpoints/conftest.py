"""Fixtures for the tests of checkpoints."""

from __future__ import annotations

import pytest
import torch

from megatron_brorl.checkpoints.model_state import ModelState
from megatron_brorl.config.schema import OptimConfig
from megatron_brorl.families.shape import read_shape
from megatron_brorl.ops.backend import backend
from megatron_brorl.train.worker import StageOptions, Worker


@pytest.fixture(scope="module")
def part(processes, model):
    """A tiny actor with its optimizer."""
    options = StageOptions(100, backend("fused", torch.device("cpu")))
    worker = Worker(read_shape(model[0]), processes, options, OptimConfig())
    worker.load_hf(model[0])
    return ModelState("", worker.actor, worker.optimizer)
