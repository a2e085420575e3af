"""Weights in FP8 with one scale per 128 x 128 block, as block-scaled Hugging Face checkpoints hold them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from megatron_brorl.ops import fp8_blocks
from megatron_brorl.ops.fp8_blocks import BLOCK
from megatron_brorl.rollout.remote.shared_weights import SCALE

_LINEARS = tuple(f"{x}_proj.weight" for x in ("q", "k", "v", "o", "gate", "up", "down"))


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> (float8_e4m3fn [N, K], scale_inv float32 [ceil(N/128), ceil(K/128)]).

    A block's scale_inv is its largest magnitude / 448, so that weight = fp8 * scale_inv up to rounding; a block of
    zeros has scale_inv 1. Format: DeepSeek-V3 (arXiv 2412.19437, 3.3), Hugging Face's quant_method "fp8".
    """
    return fp8_blocks.quantize(weight, BLOCK, powers_of_two=False)


def dequantize(weight: Tensor, scale_inv: Tensor) -> Tensor:
    """The float32 [N, K] that `quantize`'s pair stands for."""
    return fp8_blocks.dequantize(weight, scale_inv, BLOCK)


def quantized(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What an FP8 engine is sent for a Hugging Face tensor: linears [N, K] as a pair of `quantize`, all else as is."""
    if name.endswith(_LINEARS):
        weight, scale_inv = quantize(tensor)
        yield name, weight
        yield f"{name}{SCALE}", scale_inv
    else:
        yield name, tensor
