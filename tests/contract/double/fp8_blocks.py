"""Weights in FP8 with a scale per block of 128 x 128, as an engine reads them."""

from __future__ import annotations

from torch import Tensor

BLOCK = 128  # rows and columns that share a scale


def dequantize(x: Tensor, scale: Tensor) -> Tensor:
    """Return the float32 weight [N, K] of x, float8 [N, K], and its scales [ceil(N/128), ceil(K/128)]."""
    n, k = x.shape
    return x.float() * scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
