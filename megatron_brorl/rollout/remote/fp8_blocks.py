"""Weights in FP8 with one scale per 128 x 128 block, as block-scaled Hugging Face checkpoints hold them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_brorl.rollout.remote.shared_weights import SCALE

BLOCK = 128
FP8_MAX = 448.0  # the largest finite float8_e4m3fn
_LINEARS = tuple(f"{x}_proj.weight" for x in ("q", "k", "v", "o", "gate", "up", "down"))


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> (float8_e4m3fn [N, K], scale_inv float32 [ceil(N/128), ceil(K/128)]).

    A block's scale_inv is its largest magnitude / 448, so that weight = fp8 * scale_inv up to rounding; a block of
    zeros has scale_inv 1. Format: DeepSeek-V3 (arXiv 2412.19437, 3.3), Hugging Face's quant_method "fp8".
    """
    n, k = weight.shape
    padded = pad(weight.float(), (0, -k % BLOCK, 0, -n % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    amax = blocks.abs().amax(dim=(1, 3))
    scale_inv = torch.where(amax > 0, amax / FP8_MAX, torch.ones_like(amax))
    scaled = (blocks / scale_inv[:, None, :, None]).view_as(padded)[:n, :k]
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale_inv


def dequantize(weight: Tensor, scale_inv: Tensor) -> Tensor:
    """The float32 [N, K] that `quantize`'s pair stands for."""
    n, k = weight.shape
    scale = scale_inv.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    return weight.float() * scale


def quantized(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What an FP8 engine is sent for a Hugging Face tensor: linears [N, K] as a pair of `quantize`, all else as is."""
    if name.endswith(_LINEARS):
        weight, scale_inv = quantize(tensor)
        yield name, weight
        yield f"{name}{SCALE}", scale_inv
    else:
        yield name, tensor
