"""Megatron's parallel linear layers with csrc's matrix products on CPUs; communication stays Megatron's.

A product takes the norm or the activation before it along: what lies between the two is then not kept for the backward
pass (ops.fused.layers).
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_brorl.models.layers.norm import FusedRmsNorm


class FusedColumnLinear(ColumnParallelLinear):
    """ColumnParallelLinear of its normed input; a product interleaved with communication is Megatron's."""

    def take(self, norm: FusedRmsNorm) -> None:
        """Compute `norm`, the module before this one, here. Its weight stays that module's parameter."""
        norm.taken = True
        self._norm = (norm,)  # in a tuple: not a submodule

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        from megatron_brorl.ops.fused import layers as fused_layers

        (norm,) = self._norm
        if kwargs["allreduce_dgrad"] or kwargs["sequence_parallel"]:
            return super()._forward_impl(norm.normed(input), weight, *args, **kwargs)
        assert norm.eps is not None
        return fused_layers.norm_linear(input, norm.weight, norm.eps, weight, kwargs["bias"])


class FusedRowLinear(RowParallelLinear):
    """RowParallelLinear, whose communication stands outside of the product."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        from megatron_brorl.ops.fused import layers as fused_layers

        return fused_layers.linear(input, weight, kwargs["bias"])


class TakenActivation(MegatronModule):
    """Where Megatron takes a module for an MLP's activation: FusedSwiGluLinear, the next one, computes it."""

    def forward(self, gate_up: Tensor) -> Tensor:
        return gate_up


class FusedSwiGluLinear(RowParallelLinear):
    """The same of silu(gate) * up [..., K], given gate_up [..., 2 K]; without bias."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        from megatron_brorl.ops.fused import layers as fused_layers

        assert kwargs["bias"] is None
        return fused_layers.swiglu_linear(input, weight)
