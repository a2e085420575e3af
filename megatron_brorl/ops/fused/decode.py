"""The ops of a decoding step on CPUs by csrc/cpu/decode_attention.* and layer_ops.*, for heads of up to 256.

Several queries read a prompt's pages together, new keys and values are written to their places in memory, and nothing
is gathered. Tensors are float32 or bfloat16; tensors that do not fit raise ValueError, TypeError or IndexError.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_brorl.ops.decode import HeadNorms, Rows
from megatron_brorl.ops.fused import native


class FusedDecode:
    """See ops.decode.DecodeOps; on CPUs."""

    def attend(
        self, qkv: Tensor, norms: HeadNorms | None, keys: Tensor, values: Tensor, rows: Rows, scale: float, heads: int
    ) -> Tensor:
        """See DecodeOps: qkv [B, (heads + 2 K) d] -> [B, heads d]."""
        native.check_devices("decode_attention_", qkv, keys, values, *vars(rows).values())
        out = qkv.new_empty(len(qkv), heads * keys.shape[2])
        q, k, eps = (norms.q, norms.k, norms.eps) if norms else (None, None, 0.0)
        places = (rows.tables, rows.lengths, rows.prompt_tables, rows.prompt_lengths, rows.prompts)
        torch.ops.brorl.decode_attention_(qkv, q, k, eps, rows.cos, rows.sin, keys, values, *places, scale, out)
        return out

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """See DecodeOps: x [B, H], of which x + delta takes the place, and weight [H] -> [B, H]."""
        out = torch.empty_like(x)
        torch.ops.brorl.add_rms_norm_(x, delta, weight, eps, out)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See DecodeOps: [B, 2 F] -> [B, F]."""
        return torch.ops.brorl.silu_mul(gate_up)
