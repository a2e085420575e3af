"""Weights in FP8 with a scale per block of 128 x 128: DeepSeek-V3's format (arXiv 2412.19437, section 3.3)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128  # rows and columns that share a scale
FP8_MAX = 448.0  # the largest finite float8_e4m3fn


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, K] -> (float8_e4m3fn [N, K], scales float32 [ceil(N/128), ceil(K/128)]), x = fp8 * scale up to rounding.

    A scale is the largest magnitude of its block over 448; a block of zeros has scale 1. Rounding is to nearest, ties
    to even, of x in float32.
    """
    n, k = x.shape
    padded = pad(x.float(), (0, -k % BLOCK, 0, -n % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    amax = blocks.abs().amax(dim=(1, 3))
    scale = torch.where(amax > 0, amax / FP8_MAX, torch.ones_like(amax))
    scaled = (blocks / scale[:, None, :, None]).view_as(padded)[:n, :k]
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def dequantize(x: Tensor, scale: Tensor) -> Tensor:
    """Return the float32 [N, K] that a result of `quantize` represents."""
    n, k = x.shape
    return x.float() * scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
