"""Every policy loss against its formula in float64, with gradients by torch's autograd, in both implementations."""

from __future__ import annotations

import dataclasses
import typing

import pytest
import torch
from ops.linear_cases import SETTINGS, TEMPERATURE, TOLERANCE, close, make

from megatron_brorl.algo.policy_loss import POLICY_LOSSES, PolicyLossSettings
from megatron_brorl.config.schema import AlgoConfig
from megatron_brorl.ops.backend import backend

EPS_LOW, EPS_HIGH = 0.2, 0.28


def clip(r, a):
    """Return min(r A, clip(r) A) by cases (Schulman et al. 2017, eq. 7)."""
    stopped = ((a > 0) & (r > 1 + EPS_HIGH)) | ((a < 0) & (r < 1 - EPS_LOW))
    return torch.where(stopped, r.detach().clamp(1 - EPS_LOW, 1 + EPS_HIGH), r) * a


def cispo(r, a):
    """Return A log pi, weighted by the clipped ratio without gradient (MiniMax-M1, eq. 4)."""
    return r.detach().clamp(1 - EPS_LOW, 1 + EPS_HIGH) * a * r.log()


def sapo(r, a):
    """Return 4 / tau sigmoid(tau (r - 1)) A (SAPO, Gao et al. 2025), where sigmoid(x) = (1 + tanh(x / 2)) / 2."""
    tau = 1.05 - 0.05 * (a > 0).double()
    return 2 / tau * (1 + (tau * (r - 1) / 2).tanh()) * a


BY_HAND = {"clip": clip, "cispo": cispo, "sapo": sapo}  # functions of ratio and advantage


def test_every_policy_loss_has_a_formula_here():
    known = typing.get_args(typing.get_type_hints(AlgoConfig)["policy_loss"])
    assert set(known) == set(POLICY_LOSSES) == set(BY_HAND)
    names = {field.name for field in dataclasses.fields(PolicyLossSettings)}
    assert names <= {field.name for field in dataclasses.fields(AlgoConfig)}


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ops", ["fused", "reference"])
@pytest.mark.parametrize("name", BY_HAND)
def test_value_and_gradient(name, ops, dtype, ratio):
    case = make(240, 20, 90)
    settings = dataclasses.replace(SETTINGS, policy_loss=name, ratio=ratio)
    hidden, weight = (x.clone().requires_grad_() for x in (case.hidden, case.weight))
    t = case.tokens
    log_pi = (hidden @ weight.T / TEMPERATURE).log_softmax(-1).gather(-1, case.ids[:, None]).squeeze(-1)
    log_r = log_pi - t.old_log_probs
    if ratio == "sequence":
        live = t.weights != 0
        rows = [(t.sequences == s) & live for s in t.sequences]
        log_r = torch.stack([log_r[row].mean() if row.any() else log_r.sum() * 0 for row in rows])
    importance = (t.old_log_probs - t.rollout_log_probs).exp().clamp(max=SETTINGS.is_cap)
    objective = BY_HAND[name](log_r.exp(), t.advantages)
    loss = -(t.weights * importance * objective).sum()
    loss.backward()
    result, *grads = case.call(backend(ops, torch.device("cpu")).linear_ppo_loss, dtype, settings)
    assert result.loss.item() == pytest.approx(loss.item(), rel=10 * TOLERANCE[dtype], abs=TOLERANCE[dtype])
    assert all(close(a, b, TOLERANCE[dtype]) for a, b in zip(grads, (hidden.grad, weight.grad), strict=True))
