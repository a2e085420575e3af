"""What a decoding step is made of besides matrix products: the interface of ops.reference.decode and ops.fused.decode.

Keys and values live in pages of 16 tokens. B rows with one new token each; S prompts; K kv heads, d head size.
keys [pages, K, d, 16] and values [pages, K, 16, d'], with d' the multiple of 16 at or above d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

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
