"""RMSNorm for machines without Transformer Engine; unlike Megatron's own, it allows sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig


class RmsNorm(torch.nn.RMSNorm):
    """torch's RMSNorm whose weight is marked for the gradient reduction over the sequence-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        # Read by megatron.core.distributed.finalize_model_grads.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
