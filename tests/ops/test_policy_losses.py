"""Every policy loss against its formula in float64, with gradients by torch's autograd, in both implementations."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from ops import own_algorithms
from ops.linear_cases import SETTINGS, TEMPERATURE, TOLERANCE, close, make
from ops.own_algorithms import BY_HAND, sequence_log_ratio

from megatron_brorl.algo.policy_loss import POLICY_LOSSES, PolicyLossSettings
from megatron_brorl.config.schema import POLICY_LOSS_NAMES, AlgoConfig
from megatron_brorl.ops.backend import backend

FILE = str(Path(own_algorithms.__file__))
UNBOUNDED = BY_HAND | {"clip": lambda r, a: r * a, "cispo": lambda r, a: r * a * r.log()}  # without bounds


def test_every_policy_loss_has_a_formula_here():
    assert set(POLICY_LOSS_NAMES) == set(POLICY_LOSSES) == set(BY_HAND)
    names = {field.name for field in dataclasses.fields(PolicyLossSettings)}
    assert names <= {field.name for field in dataclasses.fields(AlgoConfig)}


@pytest.mark.parametrize("by_user", [False, True], ids=["built in", "function of a user"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ops", ["fused", "reference"])
@pytest.mark.parametrize("name", BY_HAND)
def test_value_gradient_and_clipped_tokens(name, ops, dtype, ratio, by_user):
    """A token counts as clipped if the bounds change its objective."""
    case = make(rows=240, width=20, vocab=90)
    case = case.change(advantages=case.tokens.advantages * (torch.arange(240) % 4 > 0))  # 0 never counts as clipped
    settings = dataclasses.replace(SETTINGS, policy_loss=name, ratio=ratio)
    if by_user:
        settings = PolicyLossSettings(is_cap=SETTINGS.is_cap, policy_loss=f"{FILE}:{name}_{ratio}")
    hidden, weight = (x.clone().requires_grad_() for x in (case.hidden, case.weight))
    tokens = case.tokens
    log_pi = (hidden @ weight.T / TEMPERATURE).log_softmax(-1).gather(-1, case.ids[:, None]).squeeze(-1)
    log_r = log_pi - tokens.old_log_probs
    if ratio == "sequence":
        log_r = sequence_log_ratio(log_r, tokens.weights != 0, tokens.sequences)
    importance = (tokens.old_log_probs - tokens.rollout_log_probs).exp().clamp(max=SETTINGS.is_cap)
    objective = BY_HAND[name](log_r.exp(), tokens.advantages)
    loss = -(tokens.weights * importance * objective).sum()
    loss.backward()
    result, *grads = case.call(backend(ops, torch.device("cpu")).linear_ppo_loss, dtype, settings)
    assert result.loss.item() == pytest.approx(loss.item(), rel=10 * TOLERANCE[dtype], abs=TOLERANCE[dtype])
    assert all(close(a, b, TOLERANCE[dtype]) for a, b in zip(grads, (hidden.grad, weight.grad), strict=True))
    clipped = (objective != UNBOUNDED[name](log_r.exp(), tokens.advantages)) & (tokens.weights != 0)
    for key, side in (("clipped_low", log_r < 0), ("clipped_high", log_r > 0)):
        assert result.sums[key] == (0 if by_user else (clipped & side).sum())


@pytest.mark.parametrize("ops", ["fused", "reference"])
def test_a_users_loss_has_the_shared_terms(ops):
    """KL, entropy bonus and importance weight are added as for a built-in loss."""
    case = make(rows=240, width=20, vocab=90)
    shared = {"is_cap": 1.5, "kl_coef": 0.3, "kl_estimator": "k3", "entropy_coef": 0.2}
    op = backend(ops, torch.device("cpu")).linear_ppo_loss
    expected = case.call(op, settings=PolicyLossSettings(**shared, ratio="sequence"))
    result = case.call(op, settings=PolicyLossSettings(**shared, policy_loss=f"{FILE}:gspo"))
    assert result[0].loss.item() == pytest.approx(expected[0].loss.item(), rel=1e-12)
    assert all(close(a, b, 1e-12) for a, b in zip(result[1:], expected[1:], strict=True))
    for key in ("reference_kl", "rollout_gap", "entropy", "tokens"):
        assert result[0].sums[key] == expected[0].sums[key]


def test_gradients_flow_through_the_entropy(tmp_path):
    """The loss is the entropy. The gradients of masked tokens are left out."""
    (tmp_path / "mine.py").write_text("def loss(entropy, log_probs, **_):\n    return entropy\n")
    case = make(rows=30, width=8, vocab=40)
    settings = PolicyLossSettings(policy_loss=f"{tmp_path / 'mine.py'}:loss")
    hidden, weight = (x.clone().requires_grad_() for x in (case.hidden, case.weight))
    log_p = (hidden @ weight.T / TEMPERATURE).log_softmax(-1)
    (case.tokens.weights * -(log_p.exp() * log_p).sum(-1)).sum().backward()
    for ops in ("fused", "reference"):
        _, *grads = case.call(backend(ops, torch.device("cpu")).linear_ppo_loss, settings=settings)
        assert all(close(a, b, 1e-12) for a, b in zip(grads, (hidden.grad, weight.grad), strict=True))
