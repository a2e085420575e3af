"""A matrix of weights that stays the same for many products."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

ROWS = 512  # that oneDNN lays the weights out for; others work as well


class Linear:
    """x [B, in] -> x weight^T + bias [B, out], with the weights in oneDNN's own layout on CPUs.

    oneDNN reads that faster than rows, and would rearrange bfloat16 weights on every call otherwise.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.bias = bias
        self.packed = weight.device.type == "cpu" and _has_layout_for(weight.dtype)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if not self.packed:
            return linear(x, self.weight, self.bias)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return product


def _has_layout_for(dtype: torch.dtype) -> bool:
    """Whether oneDNN has such a layout on this processor: bfloat16 asks for AVX-512 or more, which few laptops have."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
