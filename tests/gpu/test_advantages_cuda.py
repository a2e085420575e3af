"""The CUDA kernels of the advantage ops on the cases of the CPU ops."""

from __future__ import annotations

import pytest
import torch
from kernel_device import DEVICE, MARKS
from ops.advantage_cases import (
    GAE_CASES,
    GROUP_CASES,
    MOMENT_CASES,
    assert_moments,
    gae_by_hand,
    groups_by_hand,
    hole,
    sample,
)

from megatron_brorl.algo.advantage import Moments, whiten
from megatron_brorl.ops.fused import advantages as fused

pytestmark = MARKS

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", GAE_CASES)
def test_gae(name, dtype):
    case = GAE_CASES[name]
    for got, expected in zip(fused.gae(*case.inputs(dtype, DEVICE)), gae_by_hand(case), strict=True):
        torch.testing.assert_close(got.cpu().double(), expected, rtol=TOLERANCE[dtype], atol=10 * TOLERANCE[dtype])
        if case.mask is not None:
            assert torch.count_nonzero(got.cpu()[~case.mask]) == 0


@pytest.mark.parametrize("kind", ["mean", "mean_std"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", GROUP_CASES)
def test_group_advantages(name, dtype, kind):
    case = GROUP_CASES[name]
    got = fused.group_advantages(*case.inputs(dtype, DEVICE), kind).cpu().double()
    expected = groups_by_hand(case, kind)
    torch.testing.assert_close(got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(got == 0, expected == 0)


@pytest.mark.parametrize("name", MOMENT_CASES)
def test_moments(name):
    values, weights = MOMENT_CASES[name]
    on_device = fused.moments(values.to(DEVICE), None if weights is None else weights.to(DEVICE))
    assert_moments(fused.to_moments(on_device), values, weights)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("n", [0, 5, 21_000])
@pytest.mark.parametrize("masked", [True, False])
def test_whiten(dtype, n, masked):
    values, mask = (1e3 + 2 * sample(n)).to(dtype), hole(n) if masked else None
    if mask is not None:
        values[~mask] = float("nan")
    expected = whiten(values, Moments(10.0, 1e3, 40.0))
    if mask is not None:
        expected = torch.where(mask, expected, 0.0)
    got = fused.whiten_(values.to(DEVICE), 1e3, 2.0, None if mask is None else mask.to(DEVICE))
    torch.testing.assert_close(got.cpu(), expected, rtol=TOLERANCE[dtype], atol=0)
    assert torch.count_nonzero(fused.whiten_(values.to(DEVICE), 1e3, 0.0)) == 0


def test_repeats_bit_for_bit():
    values, weights = sample(300_000, 5.0).to(DEVICE), sample(300_000, seed=1).abs().to(DEVICE)
    first = fused.moments(values, weights)
    assert all(torch.equal(first, fused.moments(values, weights)) for _ in range(3))
    starts = torch.arange(0, 300_001, 100, device=DEVICE)
    advantages, returns = fused.gae(values, weights, starts, None, None, 0.99, 0.9)
    again = fused.gae(values, weights, starts, None, None, 0.99, 0.9)
    assert torch.equal(again[0], advantages)
    assert torch.equal(again[1], returns)
