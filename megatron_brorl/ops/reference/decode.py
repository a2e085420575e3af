"""The ops of a decoding step in plain torch, for any device and dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from megatron_brorl.ops import rope
from megatron_brorl.ops.interface import PAGE, DecodeBatch, HeadNorms

GATHERED = 1 << 26  # elements of keys gathered at a time, so that N = 512 long rows fit a GPU's memory


class DecodeOps:
    """The ops of the built-in engine's decoder. Those here gather the pages of every row, its prompt's included."""

    contiguous = False  # whether the keys of a row or of a prompt are in one page of any size, see ops.interface
    # Backend.linear_logits for bfloat16, or None where a copy of the weight in float32 is faster.
    linear_logits: Callable[[Tensor, Tensor], Tensor] | None = None

    def takes(self, dtype: torch.dtype, head_dim: int) -> bool:
        """Return whether attend computes this dtype and head size."""
        return True

    def prepare(self, batch: DecodeBatch, page: int, queries_per_key: int) -> DecodeBatch:
        """Return the batch with everything that attend derives from it, computed once for all layers.

        page: tokens of a page. queries_per_key: query heads of a kv head.
        """
        return batch

    def attend(
        self, qkv: Tensor, norms: HeadNorms | None, keys: Tensor, values: Tensor, batch: DecodeBatch, scale: float
    ) -> Tensor:
        """Write each row's new key and value to its place, then attend to the row's prompt and own tokens.

        qkv [B, (heads + 2 K) d] before normalization and rotation -> [B, heads d].
        """
        _, kv_heads, dim, _ = keys.shape
        q, k, v = qkv.float().unflatten(-1, (-1, dim)).tensor_split([-2 * kv_heads, -kv_heads], dim=1)
        if norms is not None:
            q, k = rms_norm(q, (dim,), norms.q, norms.eps), rms_norm(k, (dim,), norms.k, norms.eps)
        cos, sin = (torch.cat((x, x), dim=-1).unsqueeze(1) for x in (batch.cos, batch.sin))
        q, k = rope.rotate(q, cos, sin), rope.rotate(k, cos, sin)

        # Write the new key and value of each row to the slot of its last token.
        last = batch.lengths - 1
        page = batch.tables.gather(1, (last // PAGE).unsqueeze(1)).squeeze(1).long()
        keys[page, :, :, last % PAGE] = k.to(keys.dtype)
        values[page, :, last % PAGE, :dim] = v.to(values.dtype)

        # List the pages of each row's prompt and own tokens, and whether each slot in them holds a token.
        own_pages = int(-(-batch.lengths.max() // PAGE))  # rounded up
        tables = torch.cat((batch.prompt_tables[batch.prompts], batch.tables[:, :own_pages]), dim=1).long()
        own_slots = torch.arange(PAGE * own_pages, device=qkv.device)
        prompt_slots = torch.arange(PAGE * batch.prompt_tables.shape[1], device=qkv.device)
        prompt_filled = prompt_slots < batch.prompt_lengths[batch.prompts].unsqueeze(1)
        filled = torch.cat((prompt_filled, own_slots < batch.lengths.unsqueeze(1)), dim=1)
        tables = tables.masked_fill(~filled[:, ::PAGE], 0)  # entries beyond a length are arbitrary

        # Compute a few rows at a time, because every row gathers a copy of its keys and values.
        rows = max(1, GATHERED // (filled.shape[1] * kv_heads * dim))
        parts = zip((scale * q).split(rows), tables.split(rows), filled.split(rows), strict=True)
        return torch.cat([_attention(*part, keys, values) for part in parts]).to(qkv.dtype)

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """x [B, H] += delta, in place, and x / rms(x) * weight [H] (Zhang & Sennrich 2019, eq. 4)."""
        if delta is not None:
            x += delta
        return rms_norm(x, weight.shape, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[B, 2 F] -> [B, F]: silu of the first half times the second (Shazeer 2020)."""
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up


def _attention(q: Tensor, tables: Tensor, filled: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Softmax attention of scaled queries q [B, heads, d] over gathered slots (Vaswani et al. 2017, eq. 1).

    tables [B, n]: pages. filled [B, 16 n]: whether a slot holds a token. Returns [B, heads d] float32.
    """
    batch, _, dim = q.shape
    k = keys[tables].permute(0, 2, 3, 1, 4).flatten(3).float()  # [B, K, d, tokens]
    v = values[tables].transpose(1, 2).flatten(2, 3)[..., :dim].float()  # [B, K, tokens, d]
    # A slot without a token may hold NaN, and 0 * NaN is NaN.
    v = v.masked_fill(~filled[:, None, :, None], 0)
    # Consecutive query heads share a key and a value head.
    scores = q.view(batch, keys.shape[1], -1, dim) @ k
    weights = scores.masked_fill(~filled[:, None, None, :], float("-inf")).softmax(-1)
    return (weights @ v).view(batch, -1)
