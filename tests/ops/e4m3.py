"""float8_e4m3fn with scales per block, in float64 and from the format's definition alone."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

# The 127 magnitudes by their bits: four of exponent (bias 7), three of mantissa; all ones is NaN, and is left out.
BITS = range(127)
MAGNITUDES = [(b & 7) / 8 * 2.0**-6 if b < 8 else (1 + (b & 7) / 8) * 2.0 ** ((b >> 3) - 7) for b in BITS]
assert sorted(set(MAGNITUDES)) == MAGNITUDES
assert (MAGNITUDES[1], MAGNITUDES[-1]) == (2.0**-9, 448)


def nearest(x: Tensor) -> Tensor:
    """Each of x (float64, any shape) to the nearest of the values; of two as near, the one whose last bit is 0."""
    table = torch.tensor(MAGNITUDES, dtype=torch.float64)
    away = (x.abs().unsqueeze(-1) - table).abs()
    nearest_ones = away == away.amin(-1, keepdim=True)  # one or two
    odd = torch.tensor([b & 1 for b in BITS])
    return table[torch.where(nearest_ones, odd, 2).argmin(-1)] * x.sign()


def blocks(x: Tensor, rows: int) -> Iterator[tuple[slice, slice]]:
    """The blocks of x [N, K], rows x 128 values each or what is left."""
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], 128):
            yield slice(i, i + rows), slice(j, j + 128)


def power_of_two(block: Tensor) -> float:
    """The smallest power of two that brings a block's largest magnitude to 448 or below; 1 for zeros."""
    amax = float(block.abs().max())
    exponent = -126  # the smallest normal float32
    while amax > 448 * math.ldexp(1.0, exponent):
        exponent += 1
    return math.ldexp(1.0, exponent) if amax else 1.0


def through(x: Tensor, rows: int) -> Tensor:
    """x [N, K] in float64 after its way through FP8, block by block."""
    got = torch.empty_like(x)
    for block in blocks(x, rows):
        scale = power_of_two(x[block])
        got[block] = nearest(x[block] / scale) * scale
    return got
