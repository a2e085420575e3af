"""Inputs of the fused loss in float64, for tests on CPUs, on GPUs and with several ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_brorl.algo import policy_loss as algo_loss
from megatron_brorl.algo.policy_loss import POLICY_LOSSES, PolicyLossSettings, PolicyTokens
from megatron_brorl.ops.interface import compute_dtype
from megatron_brorl.ops.reference import linear as reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-12}
TEMPERATURE = 0.7
SETTINGS = PolicyLossSettings(eps_low=0.2, eps_high=0.28, is_cap=2.0)
EVERYTHING = PolicyLossSettings(
    eps_low=0.1, eps_high=0.5, dual_clip=1.8, is_cap=1.5, kl_coef=0.3, kl_estimator="k3", entropy_coef=0.2
)
VARIANTS = [
    SETTINGS,
    EVERYTHING,
    dataclasses.replace(SETTINGS, dual_clip=1.4),
    dataclasses.replace(SETTINGS, kl_coef=0.5, kl_estimator="k1"),
    dataclasses.replace(SETTINGS, kl_coef=0.5, kl_estimator="k2"),
    dataclasses.replace(SETTINGS, entropy_coef=0.7),
    dataclasses.replace(SETTINGS, ratio="sequence", dual_clip=1.4, entropy_coef=0.1),
    dataclasses.replace(EVERYTHING, ratio="sequence"),
]
OTHER_LOSSES = [
    dataclasses.replace(settings, policy_loss=name)
    for name in POLICY_LOSSES
    for settings in (dataclasses.replace(EVERYTHING, dual_clip=0.0), dataclasses.replace(SETTINGS, ratio="sequence"))
    if name != "clip"
]


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs of one call in float64, representable in the tested dtype; log-probs are close to the true ones."""

    hidden: Tensor  # [R, H]
    weight: Tensor  # [V, H]
    ids: Tensor  # [R]
    tokens: PolicyTokens

    def change(self, **tokens: Any) -> Case:
        return dataclasses.replace(self, tokens=dataclasses.replace(self.tokens, **tokens))

    def call(
        self,
        op: Any,
        dtype: torch.dtype = torch.float64,
        settings: PolicyLossSettings = SETTINGS,
        temperature: float = TEMPERATURE,
        upstream: float = 1.0,
        device: str = "cpu",
        **kwargs: Any,
    ) -> Any:
        """Return (result of op, gradient of hidden, gradient of weight)."""
        hidden, weight = (x.to(device, dtype, copy=True).requires_grad_() for x in (self.hidden, self.weight))
        result = op(hidden, weight, self.ids.to(device), self.tokens_in(dtype, device), settings, temperature, **kwargs)
        (upstream * result.loss).backward()
        return result, hidden.grad, weight.grad

    def tokens_in(self, dtype: torch.dtype, device: str = "cpu") -> PolicyTokens:
        tensors = {name: x.to(device) for name, x in vars(self.tokens).items() if x is not None}
        compute = compute_dtype(dtype)
        return PolicyTokens(**{name: x if name == "sequences" else x.to(compute) for name, x in tensors.items()})


def make(rows: int, width: int, vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0):
    """Return a case with a sixth of the tokens masked, sequences of 1 to 8 tokens and weights per sequence."""
    g = torch.Generator().manual_seed(1000 * seed + rows + width + vocab)
    hidden = (scale * torch.randn(rows, width, generator=g)).to(dtype).double()
    weight = (torch.randn(vocab, width, generator=g) / width**0.5).to(dtype).double()
    ids = torch.randint(0, vocab, (rows,), generator=g)
    log_probs, _ = reference.linear_log_probs(hidden, weight, ids, TEMPERATURE)
    old, rollout, ref = ((log_probs + 0.5 * torch.randn(rows, generator=g)).float().double() for _ in range(3))
    lengths = torch.randint(1, 9, (rows,), generator=g)
    sequences = torch.arange(rows).repeat_interleave(lengths)[:rows]
    weights = ((1 + sequences % 3) / (rows / 3 + 1)).float().double() * (torch.rand(rows, generator=g) > 1 / 6)
    advantages = torch.randn(rows, generator=g).double()
    return Case(hidden, weight, ids, PolicyTokens(rollout, advantages, weights, old, ref, sequences))


def close(result: Tensor, expected: Tensor, tolerance: float) -> bool:
    result, expected = result.cpu().double(), expected.cpu().double()
    return bool((result - expected).norm() <= tolerance * expected.norm() + 1e-30)


def assert_agree(returned: Any, expected: Any, tolerance: float) -> None:
    (result, *grads) = returned
    (expected_result, *expected_grads) = expected
    # The terms of the loss cancel, so its error is relative to the sum of their absolute values.
    assert result.loss.item() == pytest.approx(expected_result.loss.item(), rel=10 * tolerance, abs=tolerance)
    assert close(result.log_probs, expected_result.log_probs, tolerance)
    assert close(result.entropy, expected_result.entropy, tolerance)
    for a, b in zip(grads, expected_grads, strict=True):
        assert torch.isfinite(a).all()
        assert close(a, b, tolerance), float((a.cpu().double() - b).norm() / b.norm())
    # Gaps are differences of log-probs, so their error is relative to the larger log-prob.
    absolute = tolerance * max([1e-1, *expected_result.log_probs.abs().tolist()])
    for key in algo_loss.SUMS[1:]:  # without the loss, which is compared above
        assert result.sums[key] == pytest.approx(expected_result.sums[key], rel=tolerance * 10, abs=absolute), key
    for key in algo_loss.MAXIMA:
        assert result.maxima[key] == pytest.approx(expected_result.maxima[key], rel=tolerance * 10, abs=absolute), key


SHAPES = [  # rows, width, vocabulary
    (1, 1, 1),
    (1, 5, 2),
    (6, 1, 5),
    (7, 3, 11),
    (33, 17, 129),
    (64, 64, 1024),
    (130, 61, 2500),
    (517, 24, 1031),
    (1300, 9, 67),
]
