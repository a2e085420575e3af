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
def actor_state(processes, model):
    """A tiny actor with its optimizer."""
    options = StageOptions(tokens_per_micro_batch=100, ops=backend("fused", torch.device("cpu")))
    worker = Worker(read_shape(model[0]), processes, options, OptimConfig())
    worker.load_hf(model[0])
    return ModelState(name="", module=worker.actor, optimizer=worker.optimizer)
