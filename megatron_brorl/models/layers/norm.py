"""RMSNorm for machines without Transformer Engine; unlike Megatron's own, it allows sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_brorl.models.layers.lora import RowLinear


class RmsNorm(torch.nn.RMSNorm):
    """torch's RMSNorm whose weight is marked for the gradient reduction over the sequence-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        # Read by megatron.core.distributed.finalize_model_grads.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.zero_centred = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., H] normed and scaled by the weight, or by 1 + weight in at least float32."""
        if not self.zero_centred:
            return super().forward(x)
        dtype = torch.promote_types(x.dtype, torch.float32)
        scale = 1 + self.weight.to(dtype)
        return torch.nn.functional.rms_norm(x.to(dtype), self.normalized_shape, scale, self.eps).to(x.dtype)


class PostNormRowLinear(RowLinear):
    """RowLinear whose result is normed before it is added to the residual stream."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.post_layernorm = RmsNorm(config, output_size, config.layernorm_epsilon)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """[T, 1, in/tp] -> [T, 1, H], and no bias."""
        out, bias = super().forward(x)
        return self.post_layernorm(out), bias
