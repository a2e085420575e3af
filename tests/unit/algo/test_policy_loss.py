"""The policy loss, its KL estimates and weights against computations from the equations."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_brorl.algo.policy_loss import (
    PolicyLossSettings,
    PolicyTokens,
    kl_estimate,
    mismatch_mask,
    policy_loss,
    token_weights,
)


def draw(count: int):
    """Return log-probabilities of the actor, of the actor before the update and of the engine, and advantages."""
    rng = torch.Generator().manual_seed(2)
    lp = -3 * torch.rand(count, dtype=torch.float64, generator=rng)
    old = lp + 0.6 * torch.randn(count, dtype=torch.float64, generator=rng)
    rollout = old + 0.8 * torch.randn(count, dtype=torch.float64, generator=rng)
    return lp, old, rollout, torch.randn(count, dtype=torch.float64, generator=rng)


def test_metrics():
    """Metrics do not depend on the weights. tests/ops/test_policy_losses.py covers values, gradients and clipping."""
    lp, old, rollout, adv = draw(200)
    tokens = PolicyTokens(rollout, adv, weights=torch.full_like(lp, 1 / 77), old_log_probs=old)
    result = policy_loss(lp, torch.zeros(200), tokens, PolicyLossSettings())
    ratio = (lp - old).exp().tolist()
    assert result.sums["approx_kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratio), rel=1e-9)
    assert result.maxima["ratio_max"] == pytest.approx(max(ratio))
    assert result.maxima["rollout_gap_max"] == (lp - rollout).abs().max().item()


def test_dual_clip_bounds_the_loss_of_bad_tokens():
    """max(min(r A, clip(r) A), c A) for A < 0 (Ye et al. 2020, eq. 5), without gradient where c A is the larger."""
    ratio = torch.tensor([0.5, 1.0, 2.9, 3.1, 50.0, 50.0], dtype=torch.float64)
    advantages = torch.tensor([-1.0, -1, -1, -1, -2, 2], dtype=torch.float64)
    lp = ratio.log().requires_grad_()
    old = torch.zeros_like(advantages)
    tokens = PolicyTokens(lp.detach(), advantages, weights=torch.ones_like(advantages), old_log_probs=old)
    result = policy_loss(lp, torch.zeros(6), tokens, PolicyLossSettings(eps_low=0.2, eps_high=0.28, dual_clip=3.0))
    assert result.loss.item() == pytest.approx(0.8 + 1.0 + 2.9 + 3.0 + 6.0 - 2 * 1.28)
    (gradient,) = torch.autograd.grad(result.loss, lp)
    torch.testing.assert_close(gradient, torch.tensor([0.0, 1.0, 2.9, 0, 0, 0], dtype=torch.float64))
    assert [result.sums[f"clipped_{k}"] for k in ("low", "high", "dual")] == [1, 1, 2]


def test_kl_estimates_and_their_mean_gradients():
    """Each estimate has mean KL(p || q). The gradients are 0 (k1), that of KL(p || q) (k2) and of KL(q || p) (k3)."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(9, dtype=torch.float64, generator=rng, requires_grad=True)
    log_p = logits.log_softmax(0)
    log_q = (logits.detach() + 0.01 * torch.randn(9, dtype=torch.float64, generator=rng)).log_softmax(0)
    forward = (log_p.exp() * (log_p - log_q)).sum()
    reverse = (log_q.exp() * (log_q - log_p)).sum()
    for estimator, target in (("k1", 0 * forward), ("k2", forward), ("k3", reverse)):
        estimate = kl_estimate(log_p - log_q, estimator)
        mean = (log_p.detach().exp() * estimate).sum()
        assert mean.item() == pytest.approx(forward.item(), rel=0.05 if estimator == "k2" else 1e-12)  # k2 is biased
        (gradient,) = torch.autograd.grad(mean, logits, retain_graph=True)
        (expected,) = torch.autograd.grad(target, logits, retain_graph=True)
        torch.testing.assert_close(gradient, expected, atol=1e-15, rtol=1e-9)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", lambda rows: sum(sum(r) for r in rows) / sum(len(r) for r in rows)),
        ("sequence_mean", lambda rows: sum(sum(r) / len(r) for r in rows if r) / sum(bool(r) for r in rows)),
        ("fixed", lambda rows: sum(sum(r) for r in rows) / (8 * sum(bool(r) for r in rows))),
    ],
)
def test_aggregations(aggregation, expected):
    rows = [[1.0, 2.0, -3.5], [], [4.0], [0.5] * 8]
    lengths = [len(r) for r in rows]
    # Two ranks with two rows each add up to the global value.
    weights = [
        w
        for half in (lengths[:2], lengths[2:])
        for w in token_weights(half, aggregation, tokens=3 + 1 + 8, sequences=3, fixed=8)
    ]
    assert sum(w * x for w, row in zip(weights, rows, strict=True) for x in row) == pytest.approx(expected(rows))


def test_mismatch_masks():
    old = torch.tensor([-1.0, -1.0, -1.0, -50.0])
    rollout = old - torch.tensor([0.0, math.log(5.1), math.log(0.49), math.log(4.9)])
    assert mismatch_mask(old, rollout, "token", low=0.5, high=5.0).tolist() == [True, False, False, True]
    # The geometric mean of the ratios is (5.1 x 0.49 x 4.9)^(1/4) = 1.87.
    mean = (5.1 * 0.49 * 4.9) ** 0.25
    assert mismatch_mask(old, rollout, "sequence", low=0.5, high=mean + 1e-3).tolist() == [True] * 4
    assert mismatch_mask(old, rollout, "sequence", low=0.5, high=mean - 1e-3).tolist() == [False] * 4
    assert mismatch_mask(old[:0], rollout[:0], "sequence", low=0.5, high=5.0).tolist() == []
