"""Megatron's parallel linear layers with csrc's matrix products on CPUs; communication stays Megatron's."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor


class FusedColumnLinear(ColumnParallelLinear):
    """ColumnParallelLinear; where its product is interleaved with communication, it is Megatron's own."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs["allreduce_dgrad"] or kwargs["sequence_parallel"]:
            return super()._forward_impl(input, weight, *args, **kwargs)
        return _linear(input, weight, kwargs["bias"])


class FusedRowLinear(RowParallelLinear):
    """RowParallelLinear, whose communication stands outside of the product."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _linear(input, weight, kwargs["bias"])


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from megatron_brorl.ops import fused_layers

    return fused_layers.linear(x, weight, bias)
