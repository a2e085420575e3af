"""The CUDA kernels of the advantage ops on the cases of the CPU ops."""

from __future__ import annotations

import pytest
import torch
from kernel_device import DEVICE, MARKS
from ops.advantage_cases import (
    GAE_CASES,
    MOMENT_CASES,
    TOLERANCE,
    check_gae,
    check_moments,
    sample,
)

from megatron_brorl.algo import advantages as algo
from megatron_brorl.algo.advantages import Moments
from megatron_brorl.ops.fused import backend as fused

pytestmark = MARKS


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", GAE_CASES)
def test_gae(name, dtype):
    check_gae(fused.gae, name, dtype, DEVICE)


@pytest.mark.parametrize("name", MOMENT_CASES)
def test_moments(name):
    check_moments(fused.moments, name, DEVICE)


@pytest.mark.parametrize("weights", ["half", "one block", "none"])
def test_moments_of_weighted_elements(weights):
    index = torch.arange(30_000)
    counted = {"half": index % 2 == 0, "one block": index // 4096 == 3, "none": index < 0}[weights]
    check_moments(fused.moments, "far from zero", DEVICE, counted)


def test_moments_are_reproducible_bit_for_bit():
    values = sample(100_000, 3.0).float().to(DEVICE)
    assert len({fused.moments(values) for _ in range(3)}) == 1


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("n", [0, 5, 21_000])
def test_whiten(dtype, n):
    values = (1e3 + 2 * sample(n)).to(dtype)
    batch = Moments(10.0, 1e3, 40.0)
    got = fused.whiten(values.to(DEVICE), batch)
    torch.testing.assert_close(got.cpu(), algo.whiten(values, batch), rtol=TOLERANCE[dtype], atol=0)
