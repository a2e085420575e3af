"""Megatron's layers with csrc's ops on CPUs (ops.fused.layers). Importing this module loads the extension.

A linear layer also computes the norm or activation before it, so that the result between the two is not kept for the
backward pass. Megatron still does the communication.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor

from megatron_brorl.models.layers.attention import Segments
from megatron_brorl.models.layers.lora import ColumnLinear, RowLinear
from megatron_brorl.models.layers.norm import RmsNorm
from megatron_brorl.ops.fused import layers as ops
from megatron_brorl.ops.interface import compute_dtype


class FusedRmsNorm(RmsNorm):
    """RmsNorm by csrc. The linear layer after it may compute it instead (FusedColumnLinear.fuse_norm)."""

    in_linear = False  # True: FusedColumnLinear computes this norm, and forward() passes its input through

    def forward(self, x: Tensor) -> Tensor:
        return x if self.in_linear else self.normed(x)

    def normed(self, x: Tensor) -> Tensor:
        """Return x [..., H] normed and scaled by the weight."""
        assert self.eps is not None
        return ops.rms_norm(x, self.weight, self.eps)


class FusedColumnLinear(ColumnLinear):
    """ColumnLinear that also computes the norm of its input. Megatron computes products with communication."""

    add_product = staticmethod(ops.add_product)

    def fuse_norm(self, norm: FusedRmsNorm) -> None:
        """Compute `norm`, the module before this one, here. Its weight stays that module's parameter."""
        norm.in_linear = True
        self._norm = (norm,)  # in a tuple, so that it does not become a submodule

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """[T, 1, in], not normed -> [T, 1, out/tp] and no bias."""
        (norm,) = self._norm
        if self.tp_group.size() > 1:
            return super().forward(norm.normed(x), *args, **kwargs)
        assert norm.eps is not None
        out, down = ops.norm_linear(x, norm.weight, norm.eps, self.weight, self.bias, self.stacked_a())
        return self.with_adapters(out, down), None


class FusedRowLinear(RowLinear):
    """RowLinear by csrc, without the communication, which Megatron does after the products."""

    add_product = staticmethod(ops.add_product)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[T, 1, in/tp] -> [T, 1, H], and no bias."""
        out, down = self.products(x)
        return self.with_adapters(self.over_ranks(out), down), None

    def products(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return this rank's products of x and the weight, and of x and the adapters' a."""
        return ops.linear(x, self.weight, None, self.stacked_a())


class PassThroughActivation(MegatronModule):
    """The MLP's activation as Megatron sees it; FusedSwiGluLinear after it computes SwiGLU."""

    def forward(self, gate_up: Tensor) -> Tensor:
        return gate_up


class FusedSwiGluLinear(FusedRowLinear):
    """FusedRowLinear of silu(gate) * up [..., K], given gate_up [..., 2 K]."""

    def products(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return this rank's products of silu(gate) * up and the weight, and of it and the adapters' a."""
        return ops.swiglu_linear(x, self.weight, self.stacked_a())


class FusedExperts(SequentialMLP):
    """Megatron's experts with the products by csrc. The linear layers of an expert only hold its weights."""

    def forward(self, rows: Tensor, tokens_per_expert: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """rows [R, H], sorted by expert, and the router's weights [R] of them -> [R, H] and no bias."""
        outputs = []
        # An expert without tokens takes part, too, because overlapped reductions wait for the gradient of each weight.
        for expert, expert_rows in zip(self.local_experts, rows.split(tokens_per_expert.tolist()), strict=True):
            gate_up, _ = ops.linear(expert_rows, expert.linear_fc1.weight, None)
            outputs.append(ops.swiglu_linear(gate_up, expert.linear_fc2.weight)[0])
        out = torch.cat(outputs)
        return (out * weights.unsqueeze(-1)).to(out.dtype), None


class FusedSharedExpert(SharedExpertMLP):
    """Megatron's shared expert with FusedSwiGluLinear."""

    def forward(self, x: Tensor) -> Tensor:
        """[T, 1, H] -> [T, 1, H]."""
        out, _ = self.linear_fc2(self.linear_fc1(x)[0])
        return out * torch.nn.functional.linear(x, self.gate_weight).sigmoid()


class FusedSelfAttention(SelfAttention):
    """SelfAttention that passes the projection to FusedAttention without splitting it.

    Megatron orders the projection by kv head: for each head its queries, its key and its value.
    """

    def get_query_key_value_tensors(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None, None]:
        """hidden_states [T, 1, H] -> [T, kv_heads, queries of each + 2, d], not yet rotated, in place of the query."""
        projected, _ = self.linear_qkv(hidden_states)
        qkv = projected.view(
            len(projected), self.num_query_groups_per_partition, -1, self.hidden_size_per_attention_head
        )
        # Without norms Megatron-Core 0.16 has an IdentityOp here and 0.19 None: do not split and copy for nothing.
        if self.config.qk_layernorm:
            query, key, value = qkv.split([qkv.shape[2] - 2, 1, 1], dim=2)
            qkv = torch.cat((self.q_layernorm(query), self.k_layernorm(key), value), dim=2)
        return qkv, None, None


class FusedAttention(torch.nn.Module):
    """Causal attention within each segment and to its group's prompt, in float32."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale
        self._called_twice = config.recompute_granularity == "selective"

    def forward(
        self,
        query: Tensor,
        key: None,
        value: None,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: Segments,
        **_: Any,
    ) -> Tensor:
        """query: the result of FusedSelfAttention, which is overwritten -> [T, 1, heads * d]."""
        packing = packed_seq_params
        assert packing.cos is not None
        assert packing.sin is not None
        qkv = query.to(compute_dtype(query.dtype))
        if self._called_twice and qkv is query:
            qkv = query.clone()  # recomputation calls this again with the same tensor
        out = ops.attend(qkv, packing.cos, packing.sin, packing.table, self.scale or qkv.shape[-1] ** -0.5)
        return out.unsqueeze(1).to(query.dtype)
