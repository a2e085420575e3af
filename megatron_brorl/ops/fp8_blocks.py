"""Matrices in FP8 with a scale per block: DeepSeek-V3's format (arXiv 2412.19437, section 3.3)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128  # columns that share a scale, and rows of a weight that do
FP8_MAX = 448.0  # the largest finite float8_e4m3fn
_LEAST_EXPONENT = -126  # of a normal float32


def quantize(x: Tensor, rows: int, powers_of_two: bool) -> tuple[Tensor, Tensor]:
    """x [N, K] -> (float8_e4m3fn [N, K], scales float32 [ceil(N/rows), ceil(K/128)]), x = fp8 * scale up to rounding.

    A scale belongs to `rows` x 128 values: 128 x 128 of a weight, 1 x 128 of activations. It is the largest magnitude
    over 448, or the power of two that this is rounded up to, as in Transformer Engine's Float8BlockScaling: then
    neither dividing nor multiplying by it rounds. A block of zeros has scale 1. Rounding is to nearest, ties to even,
    of x in float32; with powers of two a block with a NaN or an infinity becomes NaN.
    """
    n, k = x.shape
    padded = pad(x.float(), (0, -k % BLOCK, 0, -n % rows))
    blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // BLOCK, BLOCK)
    amax = blocks.abs().amax(dim=(1, 3))
    scale = _power_of_two(amax) if powers_of_two else torch.where(amax > 0, amax / FP8_MAX, torch.ones_like(amax))
    scaled = (blocks / scale[:, None, :, None]).view_as(padded)[:n, :k]
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def dequantize(x: Tensor, scale: Tensor, rows: int) -> Tensor:
    """The float32 [N, K] that `quantize`'s pair stands for."""
    n, k = x.shape
    wide = scale.repeat_interleave(rows, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    return x.float() * wide


def rounded(x: Tensor, rows: int) -> Tensor:
    """x [N, K] after a way through FP8 with scales of powers of two, in its own dtype.

    A float8_e4m3fn has four significant bits, so that bfloat16 holds its product with a power of two exactly.
    """
    return dequantize(*quantize(x, rows, powers_of_two=True), rows).to(x.dtype)


def _power_of_two(amax: Tensor) -> Tensor:
    """The smallest power of two, normal in float32, that brings each amax to 448 or below."""
    # 448 = 0.875 * 2^9, and amax = mantissa * 2^exponent with a mantissa in [0.5, 1).
    mantissa, exponent = torch.frexp(amax)
    exponent = (exponent - 9 + (mantissa > 0.875).int()).clamp(min=_LEAST_EXPONENT)
    scale = ((exponent + 127) << 23).view(torch.float32)  # by its bits: torch.ldexp goes through pow, which may round
    return torch.where(amax.isfinite(), torch.where(amax > 0, scale, 1.0), torch.nan)
