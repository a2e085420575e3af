"""Advantages, selection and the clipped loss against computations written from the equations."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_brorl.algo.advantage import Moments, group_baseline, merge, moments, whiten
from megatron_brorl.algo.loss import policy_loss, token_cross_entropy
from megatron_brorl.algo.selection import has_signal, keep_informative
from megatron_brorl.types import Prompt, RolloutGroup, ScoredGroup


def scored(name: str, rewards: list[float]) -> ScoredGroup:
    prompt = Prompt(name, name, (1,), None, "exact")
    return ScoredGroup(RolloutGroup(prompt, (), 0), torch.tensor(rewards))


def test_dynamic_sampling_keeps_what_differs():
    groups = [scored("wrong", [0.0] * 4), scored("mixed", [0, 1, 0, 0]), scored("right", [1.0] * 4)]
    assert [g.group.prompt.id for g in keep_informative(groups)] == ["mixed"]
    assert not has_signal(torch.full((512,), 0.95))  # whose float32 standard deviation is not zero


@pytest.mark.parametrize("value", [0.0, 1.0, 0.95])
def test_equal_rewards_give_exactly_zero(value):
    centred = group_baseline(torch.full((512,), value))
    assert torch.count_nonzero(centred) == 0
    assert torch.count_nonzero(whiten(centred, moments(centred))) == 0


def test_advantages_follow_the_equation():
    """A = R - mean_group(R), then (A - mean_batch) / std_batch over all trajectories (BroRL, section 3.1)."""
    generator = torch.Generator().manual_seed(0)
    groups = [(torch.rand(n, generator=generator) < p).float() for n, p in ((512, 0.01), (512, 0.9), (511, 0.5))]
    centred = [group_baseline(g) for g in groups]
    batch = merge([moments(c) for c in centred])
    got = torch.cat([whiten(c, batch) for c in centred])
    raw = [x - sum(g.tolist()) / len(g) for g in groups for x in g.tolist()]
    mean = math.fsum(raw) / len(raw)
    std = math.sqrt(math.fsum((x - mean) ** 2 for x in raw) / len(raw))
    expected = torch.tensor([(x - mean) / std for x in raw])
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cuts", [(0, 100), (1, 99), (50, 50), (100, 0)])
def test_moments_merge_exactly(cuts):
    x = torch.randn(100, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3 + 1e3
    got = merge([moments(part) for part in x.split(list(cuts))])
    assert got.count == 100
    assert got.mean == pytest.approx(x.mean().item(), rel=1e-12)
    assert got.std == pytest.approx(x.std(correction=0).item(), rel=1e-12)
    assert merge([Moments(0, 0, 0)]).std == 0


def loss_by_hand(lp, old, rollout, adv, divisor, low, high, cap):
    """The objective of one token at a time in Python floats."""
    total = 0.0
    for i in range(len(lp)):
        ratio = math.exp(lp[i] - old[i])
        clipped = min(max(ratio, 1 - low), 1 + high)
        weight = min(math.exp(old[i] - rollout[i]), cap) if cap else 1.0
        total -= weight * min(ratio * adv[i], clipped * adv[i])
    return total / divisor


def draw(count: int):
    g = torch.Generator().manual_seed(2)
    lp = -3 * torch.rand(count, dtype=torch.float64, generator=g)
    old = lp + 0.6 * torch.randn(count, dtype=torch.float64, generator=g)
    rollout = old + 0.8 * torch.randn(count, dtype=torch.float64, generator=g)
    return lp, old, rollout, torch.randn(count, dtype=torch.float64, generator=g)


@pytest.mark.parametrize("cap", [0.0, 1.5])
def test_policy_loss_value_and_gradient(cap):
    lp, old, rollout, adv = draw(200)
    lp.requires_grad_()
    result = policy_loss(lp, torch.zeros(200), old, rollout, adv, 77.0, 0.2, 0.28, cap)
    (gradient,) = torch.autograd.grad(result.loss, lp)
    values = lp.detach().tolist()
    args = (old.tolist(), rollout.tolist(), adv.tolist(), 77.0, 0.2, 0.28, cap)
    assert result.loss.item() == pytest.approx(loss_by_hand(values, *args), rel=1e-12)
    h = 1e-6
    for i in range(0, 200, 7):
        up, down = list(values), list(values)
        up[i] += h
        down[i] -= h
        slope = (loss_by_hand(up, *args) - loss_by_hand(down, *args)) / (2 * h)
        assert gradient[i].item() == pytest.approx(slope, abs=1e-8)
    ratio = (lp.detach() - old).exp()
    assert result.sums["clipped_low"] == sum((ratio < 0.8) & (adv < 0))
    assert result.sums["clipped_high"] == sum((ratio > 1.28) & (adv > 0))
    assert result.sums["clipped_low"] > 0
    assert result.sums["clipped_high"] > 0
    assert result.sums["approx_kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratio.tolist()), rel=1e-9)
    assert result.maxima["rollout_gap_max"] == (lp.detach() - rollout).abs().max().item()


def test_without_old_log_probs_the_gradient_is_that_of_reinforce():
    lp, _, rollout, adv = draw(50)
    lp.requires_grad_()
    result = policy_loss(lp, torch.zeros(50), None, rollout, adv, 50.0, 0.2, 0.28, 2.0)
    (gradient,) = torch.autograd.grad(result.loss, lp)
    weight = (lp.detach() - rollout).exp().clamp(max=2.0)
    torch.testing.assert_close(gradient, -weight * adv / 50)
    assert result.maxima["ratio_max"] == 1.0


def test_overflowing_ratio_and_empty_batch_stay_finite():
    lp = torch.tensor([0.0, -1e4], requires_grad=True)
    result = policy_loss(
        lp, torch.zeros(2), torch.tensor([-1e4, 0.0]), lp.detach(), torch.tensor([-1.0, 1.0]), 2.0, 0.2, 0.28, 2.0
    )
    result.loss.backward()
    assert math.isfinite(result.loss.item())
    assert torch.isfinite(lp.grad).all()
    nothing = torch.zeros(0, requires_grad=True)
    assert policy_loss(nothing, nothing, None, nothing, nothing, 1.0, 0.2, 0.28, 2.0).loss.item() == 0.0


def test_supervised_loss_is_mean_negative_log_likelihood():
    logits = torch.randn(7, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    targets = torch.arange(7)
    picked = logits.log_softmax(-1)[torch.arange(7), targets]
    expected = torch.nn.functional.cross_entropy(logits, targets)
    torch.testing.assert_close(token_cross_entropy(picked, 7.0), expected)
