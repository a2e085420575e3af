"""The ops of a decoding step by csrc: several queries read a prompt's pages together, new keys and values go to their
places in memory, and nothing is gathered. In float32 and bfloat16, for heads of up to 256.

csrc/cpu/decode_attention.* and layer_ops.* are for CPUs, eight queries at a time; csrc/decoding has the attention as
kernels, sixteen at a time, which do not wait for the device.

Importing this file loads the extension. Raises ValueError, TypeError or IndexError for tensors that do not fit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_brorl.ops.decode import HeadNorms, Rows
from megatron_brorl.ops.fused import native
from megatron_brorl.ops.reference.decode import ReferenceDecode


class FusedDecode:
    """See ops.decode.DecodeOps; on CPUs."""

    recordable = True

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


class KernelDecode(ReferenceDecode):
    """See ops.decode.DecodeOps; on devices with kernels, where torch has what is beside attention.

    Pages and lengths that no tensor has room for are not refused there: nobody waits to look at them.
    """

    recordable = True
    attend = FusedDecode.attend


@torch.library.register_fake("brorl::decode_attention_")
def _decode_attention_fake(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    prompt_tables: Tensor,
    prompt_lengths: Tensor,
    prompts: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    return None


@torch.library.register_fake("brorl::add_rms_norm_")
def _add_rms_norm_fake(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
    return None
