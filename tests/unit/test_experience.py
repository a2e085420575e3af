"""Advantages of a batch of scored groups against the equation, by either implementation."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from megatron_brorl.config import ParallelConfig
from megatron_brorl.parallel import grid
from megatron_brorl.train.experience import make_experience
from megatron_brorl.types import Prompt, Rollout, RolloutGroup, ScoredGroup


@pytest.fixture(scope="module")
def processes():
    yield grid.build(ParallelConfig())
    grid.leave()


def scored(name: str, rewards: list[float]) -> ScoredGroup:
    rollouts = tuple(Rollout(i, torch.arange(2 + i % 3), torch.zeros(2 + i % 3), "stop") for i in range(len(rewards)))
    return ScoredGroup(RolloutGroup(Prompt(name, name, (1, 2), None, "exact"), rollouts, 0), torch.tensor(rewards))


@pytest.mark.parametrize("ops", ["fused", "reference"])
def test_advantages_follow_the_equation(processes, ops):
    """A = R - mean_group(R), then (A - mean_batch) / std_batch over all trajectories (BroRL, section 3.1)."""
    groups = [[0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.25], [0.0, 0.5, 1.0, 1.0, 0.0]]  # sizes differ: some were lost
    worker = SimpleNamespace(ops=ops, grid=processes)
    made = make_experience([scored(str(i), g) for i, g in enumerate(groups)], worker, 1.0, "rollout", 1)
    raw = [x - sum(g) / len(g) for g in groups for x in g]
    mean = math.fsum(raw) / len(raw)
    std = math.sqrt(math.fsum((x - mean) ** 2 for x in raw) / len(raw))
    expected = torch.tensor([(x - mean) / std for x in raw])
    torch.testing.assert_close(made.advantages, expected, rtol=1e-6, atol=1e-6)
    assert len(make_experience([], worker, 1.0, "rollout", 1).advantages) == 0
