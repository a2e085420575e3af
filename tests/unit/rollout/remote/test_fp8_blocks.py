"""FP8 blocks against the definition of the format, block by block."""

from __future__ import annotations

import pytest
import torch
from contract.double.fp8_blocks import dequantize

from megatron_brorl.rollout.remote.weights_in_trainer import BLOCK, quantize


@pytest.mark.parametrize(("n", "k"), [(1, 1), (128, 128), (300, 200), (129, 640)])
def test_the_largest_of_a_block_is_448_and_errors_are_half_a_unit(n, k):
    g = torch.Generator().manual_seed(n + k)
    x = torch.randn(n, k, generator=g) * torch.exp(3 * torch.randn(n, k, generator=g))
    values, scale = quantize(x)
    assert scale.shape == (-(-n // BLOCK), -(-k // BLOCK))
    back = dequantize(values, scale)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            block_scale = float(scale[i, j])
            assert block_scale == pytest.approx(float(x[block].abs().max()) / 448, rel=1e-6)
            assert float(values[block].float().abs().max()) == 448
            # Half a unit in the last of four bits, or half the smallest subnormal.
            error = (back[block].double() - x[block].double()).abs()
            assert bool((error <= x[block].double().abs() / 16 * (1 + 1e-6) + 2.0**-10 * block_scale).all())


def test_blocks_of_zeros_and_of_nan():
    x = torch.zeros(256, 128)
    x[200, 3] = float("nan")
    values, scale = quantize(x)
    assert float(scale[0, 0]) == 1
    assert torch.equal(dequantize(values, scale)[:128], x[:128])
    assert dequantize(values, scale)[200, 3].isnan()
