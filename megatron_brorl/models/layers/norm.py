"""RMSNorm for machines without Transformer Engine; unlike Megatron's own, it allows sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor


class RmsNorm(torch.nn.RMSNorm):
    """torch's RMSNorm whose weight is marked for the gradient reduction over the sequence-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        # Read by megatron.core.distributed.finalize_model_grads.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class FusedRmsNorm(RmsNorm):
    """The same by csrc (ops.fused.layers)."""

    taken = False  # by the linear layer after it, which calls `normed` or does the same (models.layers.linear)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.taken else self.normed(x)

    def normed(self, x: Tensor) -> Tensor:
        """x [..., H] normed and scaled by the weight."""
        from megatron_brorl.ops.fused import layers as fused_layers

        assert self.eps is not None
        return fused_layers.rms_norm(x, self.weight, self.eps)
