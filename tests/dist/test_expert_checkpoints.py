"""Checkpoints of mixtures of experts: resume in the same and in another layout, and conversion to Hugging Face."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tiny
import torch
from conversions import to_hf, weights
from dist.test_distributed_optimizer import BF16, OVERLAP, ZERO
from dist.test_steps import VARIANTS, assert_bit_exact, assert_same

EP = {"expert": 2}
TP_EP = {"tensor": 2, "sequence": True, "expert": 2}
CRITIC = VARIANTS["critic"]
FROZEN = VARIANTS["reward_kl"] | {"train": {"freeze_router": True}}


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    directory = tmp_path_factory.mktemp("experts")
    tiny.make_model(directory, "qwen3_moe", False)
    return str(directory)


@pytest.fixture(scope="module")
def single(worlds, experts):
    """Metrics and weights of four steps in one process, by the settings that differ."""
    found = {}

    def get(changes):
        key = repr(changes)
        if key not in found:
            (found[key],) = worlds(1).run("steps:run_steps", experts, {}, changes, 4, {})
        return found[key]

    return get


@pytest.mark.parametrize(
    ("size", "parallel", "changes", "other_size", "other"),
    [
        (1, {}, CRITIC, 2, EP),
        (2, EP, CRITIC, 1, {}),
        (2, EP, CRITIC, 4, {**TP_EP, "pipeline": 2}),
        (2, TP_EP, VARIANTS["reward_kl"], 2, EP),
        (2, TP_EP, {}, 2, {"pipeline": 2}),
        (4, {"expert": 4}, {}, 2, TP_EP),
    ],
)
def test_resume_in_another_layout(worlds, experts, tmp_path, single, size, parallel, changes, other_size, other):
    metrics, expected, _ = single(changes)
    worlds(size).run("steps:resumed", experts, parallel, changes, 2, 2, str(tmp_path))
    got = worlds(other_size).run("steps:go_on", experts, other, changes, 2, str(tmp_path))
    assert_same(got, (metrics[2:], expected, None))
    for _, found in got:
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("size", "parallel", "changes"),
    [
        (2, EP, BF16),
        (2, EP, ZERO | CRITIC),
        (2, TP_EP, ZERO | BF16),
        (4, EP, OVERLAP),
        (4, {**EP, "pipeline": 2}, BF16),
    ],
)
def test_resume_is_bit_exact(worlds, experts, tmp_path, size, parallel, changes):
    changes = changes | {"rollout": {"replay_routes": "never"}}  # the engine of these tests does not record experts
    whole = worlds(size).run("steps:run_steps", experts, parallel, changes, 4, {})
    cut = worlds(size).run("steps:resumed", experts, parallel, changes, 4, 2, str(tmp_path))
    assert_bit_exact(cut, whole)


def test_the_distributed_optimizer_needs_the_saved_expert_size(worlds, experts, tmp_path, single):
    """Another number of replicas is allowed."""
    metrics, expected, _ = single({})
    worlds(2).run("steps:resumed", experts, EP, ZERO, 2, 2, str(tmp_path))
    got = worlds(4).run("steps:go_on", experts, EP, ZERO, 2, str(tmp_path))
    assert_same(got, (metrics[2:], expected, None))
    for refused in worlds(2).run("saving_jobs:refused", experts, {}, ZERO, str(tmp_path)):
        assert re.search("parallel.expert = 2 and this run has .*parallel.expert = 1;", refused)


def test_a_checkpoint_with_frozen_routers_becomes_a_hugging_face_directory(worlds, experts, tmp_path):
    ((_, expected), _) = worlds(2).run("steps:resumed", experts, EP, FROZEN, 2, 2, str(tmp_path))
    to_hf(tmp_path / "checkpoints" / "step_00000002", tmp_path / "back", Path(experts))
    found = weights(tmp_path / "back")
    assert found.keys() == expected.keys()
    before = tiny.weights(experts)
    for name, value in found.items():
        assert torch.equal(value, expected[name])
        assert torch.equal(value, before[name]) == (".mlp.gate." in name)
