"""The product of hidden states with the LM head: in the dtype of both, or in FP8 with a scale per block.

In FP8 hidden states are rounded per 1 x 128 and the weight per 128 x 128 values to float8_e4m3fn, with powers of two as
scales (ops.fp8_blocks), and the products summed in float32. Tensor cores multiply them on a GPU. A CPU multiplies the
rounded values in the dtype of the matrices, which holds them exactly: all but the order of the sums is the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import pad

from megatron_brorl.errors import UserError
from megatron_brorl.ops.fp8_blocks import BLOCK, quantize, rounded
from megatron_brorl.ops.fused.softmax import gemm_

Product = Callable[[Tensor, Tensor], None]  # writes logits [R, V] of hidden [R, H]
ROWS_ROUNDED = 64 * BLOCK  # rows of the weight that are widened to float32 at a time
ROWS_ALIGNED = 16  # rows of hidden states that cuBLAS takes a multiple of


def head_product(weight: Tensor, fp8: bool) -> Product:
    """What multiplies by weight [V, H]^T; fp8: by weight and hidden states rounded, of which the weight is so here."""
    if not fp8:
        return lambda out, hidden: gemm_(out, hidden, weight.t(), accumulate=False)
    if weight.is_cuda:
        return _scaled_product(weight)
    # By parts of whole blocks, which bounds the float32 copies.
    parts = [rounded(part, BLOCK) for part in weight.split(ROWS_ROUNDED)]
    head = torch.cat(parts) if parts else weight
    return lambda out, hidden: gemm_(out, rounded(hidden, 1), head.t(), accumulate=False)


def check_fp8(device: torch.device) -> None:
    """Raise UserError where a GPU or its torch has no product of matrices with scales per block.

    Requirements: aten/src/ATen/native/cuda/ScaledBlas.cpp, torch 2.10 to 2.13; cuBLAS has it since CUDA 12.9.
    """
    if device.type == "cpu":
        return
    gpu, cuda = torch.cuda.get_device_capability(device), torch.version.cuda
    if why := problem(gpu, cuda or "0", hasattr(functional, "scaled_mm")):
        raise UserError(f'fp8.head = "blockwise": {why}: set it to "none"')


def problem(capability: tuple[int, int], cuda: str, has_product: bool) -> str:
    """Why a GPU of this compute capability cannot multiply so, or "". has_product: torch has functional.scaled_mm."""
    found = re.match(r"(\d+)\.(\d+)", cuda)
    if capability[0] != 9:
        return "block scaling needs compute capability 9.0 (this GPU: {}.{})".format(*capability)
    if not found or (int(found[1]), int(found[2])) < (12, 9):
        return f"block scaling needs CUDA 12.9 (torch's here: {cuda})"
    if not has_product:
        return f"block scaling needs torch 2.10 (here: {torch.__version__})"
    return ""


def _scaled_product(weight: Tensor) -> Product:
    """By cuBLAS. Layouts are those of ScaledBlas.cpp: 1 x 128 scales lie column by column, 128 x 128 ones in fours."""
    kinds = functional.ScalingType
    vocab = len(weight)

    # Rows and columns up to whole blocks: a block of zeros has scale 1 and adds nothing.
    parts = [quantize(_whole(part, BLOCK), BLOCK, powers_of_two=True) for part in weight.split(ROWS_ROUNDED)]
    values, scales = (torch.cat(x) for x in zip(*parts, strict=True))
    # As many scales to a row of blocks as the kernel reads at a time.
    scales = pad(scales, (0, -scales.shape[1] % 4)).t()

    def product(out: Tensor, hidden: Tensor) -> None:
        # One chunk of hidden states, its scales column by column.
        rows, row_scales = quantize(_whole(hidden, ROWS_ALIGNED), 1, powers_of_two=True)
        logits = functional.scaled_mm(
            rows,
            values.t(),
            row_scales.t().contiguous().t(),
            kinds.BlockWise1x128,
            scales,
            kinds.BlockWise128x128,
            output_dtype=torch.float32,
        )
        # Without what was added to fill blocks.
        out.copy_(logits[: len(hidden), :vocab])

    return product


def _whole(x: Tensor, rows: int) -> Tensor:
    """x [N, K] with zeros up to a multiple of `rows` rows and of 128 columns."""
    return pad(x, (0, -x.shape[1] % BLOCK, 0, -x.shape[0] % rows))
