"""FP8 with scales per block against the format's definition in float64."""

from __future__ import annotations

import math

import pytest
import torch
from ops.e4m3 import MAGNITUDES, blocks, nearest, power_of_two, through

from megatron_brorl.ops.fp8_blocks import BLOCK, dequantize, quantize, rounded

SHAPES = [(1, 1), (5, 128), (128, 200), (300, 130), (257, 384)]


def matrix(n: int, k: int, seed: int = 0) -> torch.Tensor:
    """[n, k] float32 whose magnitudes differ by orders between neighbouring blocks and within them."""
    g = torch.Generator().manual_seed(seed + n + k)
    return torch.randn(n, k, generator=g) * torch.exp(3 * torch.randn(n, k, generator=g))


def test_every_value_and_every_tie():
    table = torch.tensor(MAGNITUDES)
    ties = (table[1:] + table[:-1]) / 2
    near = [torch.nextafter(ties, ties.new_full((), to)) for to in (0.0, math.inf)]
    x = torch.cat((table, ties, *near))
    x = torch.cat((x, -x))
    padded = torch.full((len(x), 128), 448.0)  # so that every scale is 1
    padded[:, 0] = x
    values, scale = quantize(padded, 1, powers_of_two=True)
    assert bool((scale == 1).all())
    assert torch.equal(values[:, 0].double(), nearest(x.double()))
    assert torch.equal(values[: len(table), 0].float(), table)


@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_powers_of_two_against_float64(n, k, rows):
    x = matrix(n, k)
    values, scale = quantize(x, rows, powers_of_two=True)
    assert scale.flatten().tolist() == [power_of_two(x[block]) for block in blocks(x, rows)]
    expected = through(x.double(), rows)
    assert torch.equal(dequantize(values, scale, rows).double(), expected)
    assert torch.equal(rounded(x, rows).double(), expected)
    # bfloat16 holds what comes of it, whatever went in.
    of_bfloat16 = rounded(x.bfloat16(), rows)
    assert of_bfloat16.dtype == torch.bfloat16
    assert torch.equal(of_bfloat16.double(), through(x.bfloat16().double(), rows))


@pytest.mark.parametrize("rows", [1, 128])
def test_exact_scales_use_the_whole_range(rows):
    """With the largest magnitude over 448 as scale, the largest of each block is 448, whatever it was."""
    x = matrix(300, 200)
    values, scale = quantize(x, rows, powers_of_two=False)
    for (i, j), found in zip(blocks(x, rows), scale.flatten(), strict=True):
        assert float(found) == pytest.approx(float(x[i, j].abs().max()) / 448, rel=1e-6)
        assert float(values[i, j].float().abs().max()) == 448
        # Half a unit in the last of four bits, or of the smallest subnormal.
        error = (values[i, j].double() * found.double() - x[i, j].double()).abs()
        assert bool((error <= x[i, j].double().abs() / 16 * (1 + 1e-6) + 2.0**-10 * found.double()).all())


@pytest.mark.parametrize(
    ("largest", "scale"),
    [
        (448.0, 1.0),
        (math.nextafter(448.0, 0), 1.0),
        (448.00003, 2.0),
        (896.0, 2.0),
        (1e4, 32.0),
        (3.2e38, 2.0**120),  # from 3.3e38 on rounded to 2^128, which float32 does not hold
        (0.875, 2.0**-9),
        (1e-40, 2.0**-126),
        (0.0, 1.0),
    ],
)
def test_scales_of_edges(largest, scale):
    x = torch.zeros(1, 128)
    x[0, 77] = largest
    values, found = quantize(x, 1, powers_of_two=True)
    assert found.item() == scale
    assert torch.equal(dequantize(values, found, 1).double(), through(x.double(), 1))
    assert values.float().isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_spoils_its_block_alone(bad):
    x = matrix(3, 256)
    x[1, 130] = bad
    got = rounded(x, 1)
    assert bool(got[1, 128:].isnan().all())
    x[1, 128:] = got[1, 128:] = 0
    assert torch.equal(got.double(), through(x.double(), 1))


def test_shards_of_whole_blocks_are_rounded_as_the_whole():
    x = matrix(640, 200)
    assert torch.equal(torch.cat([rounded(part, BLOCK) for part in x.split(256)]), rounded(x, BLOCK))
    assert not torch.equal(torch.cat([rounded(part, BLOCK) for part in x.split(320)]), rounded(x, BLOCK))
