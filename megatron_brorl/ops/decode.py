"""What a decoding step is made of besides matrix products, by plain torch or by csrc/: one interface, two versions.

Keys and values live in pages of 16 tokens. B rows with one new token each; S prompts; K kv heads, d head size.
keys [pages, K, d, 16] and values [pages, K, 16, d'], with d' the multiple of 16 at or above d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from megatron_brorl.ops import rope

PAGE = 16  # tokens


@dataclass(frozen=True)
class Rows:
    """Where each row of a step stands; the same for all layers."""

    cos: Tensor  # [B, d / 2] float32 of each row's position
    sin: Tensor
    tables: Tensor  # [B, n] int32: the pages of the row's own tokens
    lengths: Tensor  # [B] int64: own tokens, the new one included
    prompts: Tensor  # [B] int64: the row's prompt; rows of one prompt side by side are the fast case
    prompt_tables: Tensor  # [S, n] int32
    prompt_lengths: Tensor  # [S] int64


@dataclass(frozen=True)
class HeadNorms:
    """Weights of the normalization of query and key heads (Qwen3), [d] float32 each."""

    q: Tensor
    k: Tensor
    eps: float


class DecodeOps(Protocol):
    def attend(
        self, qkv: Tensor, norms: HeadNorms | None, keys: Tensor, values: Tensor, rows: Rows, scale: float, heads: int
    ) -> Tensor:
        """Write each row's new key and value to its place, then attend to the row's prompt and own tokens.

        qkv [B, (heads + 2 K) d] before normalization and rotation -> [B, heads d].
        """

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """x [B, H] += delta, in place, and x / rms(x) * weight (Zhang & Sennrich 2019, eq. 4)."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[B, 2 F] -> [B, F]: silu of the first half times the second (Shazeer 2020)."""


class Reference:
    """Plain torch, for any device and dtype; gathers every row's pages, the prompt's too."""

    def attend(
        self, qkv: Tensor, norms: HeadNorms | None, keys: Tensor, values: Tensor, rows: Rows, scale: float, heads: int
    ) -> Tensor:
        _, kv_heads, dim, _ = keys.shape
        batch = len(qkv)
        q, k, v = qkv.float().unflatten(-1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1)
        if norms is not None:
            q, k = rms_norm(q, (dim,), norms.q, norms.eps), rms_norm(k, (dim,), norms.k, norms.eps)
        cos, sin = (torch.cat((x, x), dim=-1).unsqueeze(1) for x in (rows.cos, rows.sin))
        q, k = rope.rotate(q, cos, sin), rope.rotate(k, cos, sin)
        place = rows.lengths - 1
        page = rows.tables.gather(1, (place // PAGE).unsqueeze(1)).squeeze(1).long()
        keys[page, :, :, place % PAGE] = k.to(keys.dtype)
        values[page, :, place % PAGE, :dim] = v.to(values.dtype)
        used = int(-(-rows.lengths.max() // PAGE))
        tables = torch.cat((rows.prompt_tables[rows.prompts], rows.tables[:, :used]), dim=1).long()
        slots = torch.arange(PAGE * used, device=qkv.device)
        prompt_slots = torch.arange(PAGE * rows.prompt_tables.shape[1], device=qkv.device)
        there = torch.cat(
            (
                prompt_slots < rows.prompt_lengths[rows.prompts].unsqueeze(1),
                slots < rows.lengths.unsqueeze(1),
            ),
            dim=1,
        )
        tables = tables.masked_fill(~there[:, ::PAGE], 0)  # entries beyond a length hold anything
        k = keys[tables].permute(0, 2, 3, 1, 4).flatten(3).float()  # [B, K, d, tokens]
        v = values[tables].transpose(1, 2).flatten(2, 3)[..., :dim].float()  # [B, K, tokens, d]
        v = v.masked_fill(~there[:, None, :, None], 0)
        scores = (scale * q).view(batch, kv_heads, -1, dim) @ k
        weights = scores.masked_fill(~there[:, None, None, :], float("-inf")).softmax(-1)
        return (weights @ v).view(batch, -1).to(qkv.dtype)

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if delta is not None:
            x += delta
        return rms_norm(x, weight.shape, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up
