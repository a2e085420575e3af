"""Cases of the value loss, for the CPU and GPU tests, and the loss written as a loop over Python floats."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs of one call in float64, exactly representable in float32."""

    values: Tensor
    old_values: Tensor
    returns: Tensor
    weights: Tensor
    clip: float

    def call(self, op: Any, dtype: torch.dtype, device: str = "cpu", upstream: float = 1.0) -> tuple[Any, Tensor]:
        """Return (result of op, gradient of values)."""
        values, *rest = (x.to(device, dtype) for x in (self.values, self.old_values, self.returns, self.weights))
        values = values.clone().requires_grad_()
        result = op(values, *rest, self.clip)
        (upstream * result.loss).backward()
        return result, values.grad


@dataclasses.dataclass(frozen=True)
class Expected:
    loss: float
    gradient: list[float]
    clipped: int
    tokens: int
    returns: tuple[float, float]  # mean, sum of squared deviations
    residuals: tuple[float, float]  # the same, of target - value


def by_hand(case: Case) -> Expected:
    """Compute the loss token by token, with exact sums."""
    losses = []
    gradient = []
    clipped = 0
    returns = []
    residuals = []
    rows = zip(*(x.tolist() for x in (case.values, case.old_values, case.returns, case.weights)), strict=True)
    for v, old, target, weight in rows:
        if weight == 0:
            gradient.append(0.0)
            continue
        clipped_v = v if math.isinf(case.clip) else min(max(v, old - case.clip), old + case.clip)
        is_clipped = (clipped_v - target) ** 2 > (v - target) ** 2
        losses.append(weight * 0.5 * max((v - target) ** 2, (clipped_v - target) ** 2))
        gradient.append(0.0 if is_clipped else weight * (v - target))
        clipped += is_clipped
        returns.append(target)
        residuals.append(target - v)

    def spread(xs: list[float]) -> tuple[float, float]:
        if not xs:
            return 0.0, 0.0
        mean = statistics.fmean(xs)
        return mean, math.fsum((x - mean) ** 2 for x in xs)

    return Expected(math.fsum(losses), gradient, clipped, len(returns), spread(returns), spread(residuals))


def make(rows: int, clip: float = 0.2, masked: float = 0.3, offset: float = 0.0, seed: int = 0) -> Case:
    """Return a case with a third of the values out of range and NaN or infinity at masked tokens."""
    g = torch.Generator().manual_seed(1000 * seed + rows)
    old, noise, residual = torch.randn(3, rows, generator=g)
    old = old + offset
    values = old + 0.25 * noise
    returns = values + residual
    weights = (torch.rand(rows, generator=g) + 0.5) / max(rows, 1)
    is_masked = torch.rand(rows, generator=g) < masked
    weights[is_masked] = 0
    values[is_masked] = float("nan")
    old[is_masked] = float("inf")
    returns[is_masked] = float("-inf")
    return Case(*(x.double() for x in (values, old, returns, weights)), clip)


CASES = {
    "one": make(1, masked=0.0),
    "few": make(7),
    "unclipped": make(100, clip=math.inf),
    "clip zero": make(100, clip=0.0),
    "many": make(5003),
    "many blocks": make(20000, seed=3),
    "nothing masked": make(4097, masked=0.0),
    "far from zero": make(3000, clip=0.25, offset=1e4),  # a clip for which the float32 sum is exact
    "all masked": make(50, masked=1.1),
    "empty": make(0),
}


def assert_agree(returned: tuple[Any, Tensor], case: Case, upstream: float, tolerance: float) -> None:
    """Compare with by_hand. The error of gradients is relative to the largest gradient."""
    result, gradient = returned
    expected = by_hand(case)
    expected_gradient = upstream * torch.tensor(expected.gradient, dtype=torch.float64)
    scale = float(expected_gradient.abs().max()) if len(expected_gradient) else 0.0
    torch.testing.assert_close(gradient.cpu().double(), expected_gradient, rtol=tolerance, atol=tolerance * scale)
    assert math.isclose(result.loss.item(), expected.loss, rel_tol=tolerance)
    assert math.isclose(result.sums["loss"], expected.loss, rel_tol=tolerance)
    assert result.sums["tokens"] == result.returns.count == result.residuals.count == expected.tokens
    assert result.sums["clipped"] == expected.clipped
    for moments, (mean, m2) in ((result.returns, expected.returns), (result.residuals, expected.residuals)):
        assert math.isclose(moments.mean, mean, rel_tol=tolerance, abs_tol=tolerance)
        assert math.isclose(moments.m2, m2, rel_tol=100 * tolerance)
