"""Checks of the advantage ops for the CPU and GPU tests, against the formulas written as loops over Python floats."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
LENGTHS = [0, 1, 2, 31, 32, 33, 0, 0, 64, 65, 100, 1, 300, 0]
GAE_CASES: dict[str, tuple[list[int], float, float]] = {  # segment lengths, gamma, lambda
    "plain": (LENGTHS, 0.99, 0.95),
    "undiscounted": (LENGTHS, 1.0, 1.0),
    "one step": (LENGTHS, 0.9, 0.0),
    "myopic": (LENGTHS, 0.0, 0.7),
    "one segment": ([700], 0.999, 0.98),
    "no segments": ([], 0.9, 0.9),
    "no tokens": ([0, 0], 0.9, 0.9),
}


def sample(n: int, mean: float = 0.0, std: float = 1.0, seed: int = 0) -> Tensor:
    """Return [n] float64 values that float32 represents to 1e-7."""
    return mean + std * torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n + seed))


def gae_inputs(name: str) -> tuple[Tensor, Tensor, Tensor, float, float]:
    """Return (rewards [T], values [T], starts [S + 1], gamma, lam) in float64, exactly representable in float32."""
    lengths, gamma, lam = GAE_CASES[name]
    total = sum(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return sample(total).float().double(), sample(total, seed=1).float().double(), starts, gamma, lam


def gae_by_hand(rewards: Tensor, values: Tensor, starts: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return the closed form of the recursion: A_t = sum_l (gamma lam)^l delta_{t + l}, and A_t + V_t."""
    advantages = torch.zeros_like(rewards)
    for begin, end in zip(starts.tolist()[:-1], starts.tolist()[1:], strict=True):
        v = [*values[begin:end].tolist(), 0.0]  # The value after the last token is 0.
        deltas = [r + gamma * v[i + 1] - v[i] for i, r in enumerate(rewards[begin:end].tolist())]
        for i in range(len(deltas)):
            advantages[begin + i] = math.fsum((gamma * lam) ** k * x for k, x in enumerate(deltas[i:]))
    return advantages, advantages + values


def check_gae(op: Any, name: str, dtype: torch.dtype, device: str = "cpu") -> None:
    rewards, values, starts, gamma, lam = gae_inputs(name)
    results = op(rewards.to(device, dtype), values.to(device, dtype), starts.to(device), gamma, lam)
    for result, expected in zip(results, gae_by_hand(rewards, values, starts, gamma, lam), strict=True):
        assert result.dtype == dtype
        torch.testing.assert_close(result.cpu().double(), expected, rtol=TOLERANCE[dtype], atol=10 * TOLERANCE[dtype])


MOMENT_CASES: dict[str, Tensor] = {
    "few": sample(5),
    "shaped": sample(6000).view(20, 3, 100),
    "many": sample(600_000, mean=2.0),
    "far from zero": sample(30_000, mean=1e6),
    "float32": sample(200_000, mean=1e6).float(),
    "constant": torch.full((5000,), 0.1, dtype=torch.float64),
    "strided": sample(900).view(30, 30).t(),
    "empty": sample(0),
}


def check_moments(op: Any, name: str, device: str = "cpu", weights: Tensor | None = None) -> None:
    """Compare with exact sums. weights: 0 for elements that do not count, which the op gets as NaN; None: all count."""
    values = MOMENT_CASES[name]
    counted = values.flatten() if weights is None else values[weights != 0]
    x = counted.double().tolist()
    mean = math.fsum(x) / len(x) if x else 0.0
    if weights is None:
        moments = op(values.to(device))
    else:
        moments = op(values.masked_fill(weights == 0, math.nan).to(device), weights.to(device, values.dtype))
    assert moments.count == len(x)
    assert math.isclose(moments.mean, mean, rel_tol=1e-13, abs_tol=1e-15)
    m2 = math.fsum((v - mean) ** 2 for v in x)
    assert math.isclose(moments.m2, m2, rel_tol=1e-10 if abs(mean) > 1e5 else 1e-12, abs_tol=1e-20)
