"""Decoding and sampling on CPUs by csrc/cpu/{decode_attention,layer_ops,sample_tokens}.*, for heads of up to 256.

Several queries read a prompt's pages together, new keys and values are written in place, and nothing is gathered.
Tensors are float32 or bfloat16. Wrong shapes, dtypes and indices raise ValueError, TypeError or IndexError.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_brorl.ops.fused import linear, native
from megatron_brorl.ops.interface import DecodeBatch, HeadNorms
from megatron_brorl.ops.reference.decode import ReferenceDecode


class FusedDecode(ReferenceDecode):
    """See ops.interface.DecodeOps; on CPUs."""

    linear_logits = staticmethod(linear.linear_logits) if native.BFLOAT16_KERNEL else None

    def attend(
        self, qkv: Tensor, norms: HeadNorms | None, keys: Tensor, values: Tensor, batch: DecodeBatch, scale: float
    ) -> Tensor:
        """See DecodeOps: qkv [B, (heads + 2 K) d] -> [B, heads d]."""
        places = (batch.tables, batch.lengths, batch.prompt_tables, batch.prompt_lengths, batch.prompts)
        native.check_devices("decode_attention_", qkv, keys, values, batch.cos, batch.sin, *places)
        _, kv_heads, dim, _ = keys.shape
        out = qkv.new_empty(len(qkv), qkv.shape[1] - 2 * kv_heads * dim)
        q, k, eps = (norms.q, norms.k, norms.eps) if norms else (None, None, 0.0)
        torch.ops.brorl.decode_attention_(qkv, q, k, eps, batch.cos, batch.sin, keys, values, *places, scale, out)
        return out

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """See DecodeOps: x [B, H], overwritten by x + delta, and weight [H] -> [B, H]."""
        out = torch.empty_like(x)
        torch.ops.brorl.add_rms_norm_(x, delta, weight, eps, out)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See DecodeOps: [B, 2 F] -> [B, F]."""
        return torch.ops.brorl.silu_mul(gate_up)


def sample_tokens(
    logits: Tensor,
    keys: Tensor,
    index: Tensor,
    position: Tensor,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
) -> tuple[Tensor, Tensor]:
    """Sample as ops.reference.sampling.sample_tokens, but without copying or sorting the logits.

    logits [B, V] float32 or bfloat16, whose rows may be strided; keys (63 bits), index and position (32 bits) [B]
    int64. Returns ids [B] int64 and their log-probabilities [B] float32 in nats under the distribution they were drawn
    from. A row depends neither on other rows nor on the number of threads. An id can differ from the reference's if the
    uniform is within float32 rounding of a step of the CDF. -inf masks a token. Raises ValueError for a row with NaN or
    +inf or with nothing above -inf, and for a wrong shape, value or device; TypeError for a wrong dtype.
    """
    native.check_devices("sample_tokens", logits, keys, index, position)
    with torch.no_grad():
        ids, log_probs = torch.ops.brorl.sample_tokens(logits, keys, index, position, temperature, top_p, top_k)
    return ids, log_probs
