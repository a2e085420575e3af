"""Advantages against their equations, and their expected gradient over all draws of a small policy against autograd."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import comb

import pytest
import torch
from torch import Tensor

from megatron_brorl.algo.advantages import (
    ADVANTAGES,
    Moments,
    group_advantages,
    group_baseline,
    group_normalised,
    has_signal,
    merge,
    moments,
    over_group_mean,
)
from megatron_brorl.algo.pass_at_k import pass_at_k_advantages
from megatron_brorl.config.schema import ADVANTAGE_NAMES, AlgoConfig

RIGHT = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)  # two of three outcomes are right
POLICIES = pytest.mark.parametrize("logits", [[0.3, -1.0, 0.8], [2.5, 0.0, -3.0]])
SIZES = pytest.mark.parametrize("n", [2, 3, 5, 6])


def gradient(logits: list[float], objective: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the gradient of a function of the success rate with respect to the logits, by autograd."""
    x = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(objective((x.softmax(0) * RIGHT).sum()), x)[0]


def expected(logits: list[float], n: int, advantages: Callable[[Tensor], Tensor]) -> Tensor:
    """Return E[mean_i A_i grad log p(y_i)] over all 3^n draws of a softmax."""
    p = torch.tensor(logits, dtype=torch.float64).softmax(0)
    scores = torch.eye(3, dtype=torch.float64) - p  # grad log p(y) is the outcome's unit vector minus p
    total = torch.zeros(3, dtype=torch.float64)
    for draws in product(range(3), repeat=n):
        a = advantages(RIGHT[list(draws)])
        assert abs(float(a.sum())) < 1e-9
        total += p[list(draws)].prod() * (a[:, None] * scores[list(draws)]).mean(0)
    return total


def close(result: Tensor, reference: Tensor) -> None:
    assert reference.abs().max() > 1e-3
    torch.testing.assert_close(result, reference, rtol=1e-11, atol=1e-12)


def test_every_name_has_an_advantage():
    assert set(ADVANTAGE_NAMES) == set(ADVANTAGES)


@SIZES
@POLICIES
def test_maxrl_is_unbiased_for_the_truncated_logarithm(n, logits):
    truncated = gradient(logits, lambda p: -sum((1 - p) ** k / k for k in range(1, n)))
    close(expected(logits, n, over_group_mean), truncated)


@SIZES
@POLICIES
def test_rloo_is_unbiased_for_the_success_rate_and_dr_grpo_shorter(n, logits):
    """The group mean of dr_grpo contains the rollout itself, which shortens the gradient by (n - 1) / n."""
    groups = torch.tensor(list(product((0.0, 1.0), repeat=n)))  # all 2^n groups of n rewards
    mask = torch.ones_like(groups, dtype=torch.bool)
    for name, factor in (("rloo", 1), ("dr_grpo", (n - 1) / n)):
        advantages = group_advantages(groups, mask, [{}] * len(groups), AlgoConfig(advantage=name))
        advantages_of = dict(zip(map(tuple, groups.tolist()), advantages, strict=True))
        mean = expected(logits, n, lambda r, advantages_of=advantages_of: advantages_of[tuple(r.tolist())])
        close(mean, factor * gradient(logits, lambda p: p))


@pytest.mark.parametrize(("n", "k"), [(2, 1), (4, 1), (4, 2), (4, 3), (6, 4)])
@POLICIES
def test_pass_at_k_is_unbiased(n, k, logits):
    close(expected(logits, n, lambda r: pass_at_k_advantages(r, k)), gradient(logits, lambda p: 1 - (1 - p) ** k))


def test_k_is_at_most_the_number_of_siblings():
    rewards = torch.tensor([1.0, 0.0, 0.0])
    assert torch.equal(pass_at_k_advantages(rewards, 8), pass_at_k_advantages(rewards, 2))
    assert pass_at_k_advantages(rewards, 8).abs().max() > 0


def test_pass_at_k_is_accurate_for_large_groups():
    """With one right rollout of 512, its advantage is exactly k = 64, and that of each wrong rollout -k / 511."""
    rewards = torch.zeros(512)
    rewards[7] = 1.0
    advantages = pass_at_k_advantages(rewards, 64)
    assert float(advantages[7]) == 64.0
    assert float(advantages[0]) == pytest.approx(-64 / 511)
    half = torch.tensor([1.0, 0.0] * 256)
    all_wrong = comb(256, 64) / comb(511, 64)  # the chance that 64 siblings of a right rollout are all wrong
    assert float(pass_at_k_advantages(half, 64)[0]) == pytest.approx(64 * all_wrong, rel=1e-6)


def test_groups_without_a_signal_are_exactly_zero():
    """Groups that algo.dynamic_sampling drops would add nothing to the gradient."""
    for advantages_of in (group_baseline, group_normalised, over_group_mean, lambda r: pass_at_k_advantages(r, 3)):
        for rewards in ([0.0] * 4, [1.0] * 4, [1.0] * 512, [0.0]):
            assert torch.equal(advantages_of(torch.tensor(rewards)), torch.zeros(len(rewards)))
    assert torch.equal(over_group_mean(torch.tensor([0.95] * 512)), torch.zeros(512))  # 0.95 is rounded


def test_only_different_rewards_are_a_signal():
    groups = {(0.0, 1.0, 0.0): True, (1.0, 1.0): False, (1.0,): False, (0.95,) * 512: False}
    assert {rewards: has_signal(torch.tensor(rewards)) for rewards in groups} == groups


@pytest.mark.parametrize("sizes", [(0, 100), (1, 99), (50, 50), (100, 0)])
def test_moments_merge_exactly(sizes):
    x = torch.randn(100, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3 + 1e3
    merged = merge([moments(part) for part in x.split(list(sizes))])
    deviation = x.std(correction=0).item()
    assert (merged.count, merged.mean, merged.std) == pytest.approx((100, x.mean().item(), deviation), rel=1e-12)
    assert merge([Moments(0, 0, 0)]).std == 0
