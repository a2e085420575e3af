"""Interface of the ops: everything that training and sampling compute apart from the layers.

ops.reference defines the results in plain torch. ops.fused computes the same, up to rounding, with csrc/. ops.backend
selects one of the two.

The built-in engine keeps keys and values in pages. With B rows of one new token each, S prompts, K kv heads and head
size d, a page of 16 tokens has keys [pages, K, d, 16] and values [pages, K, 16, d'], with d' = d rounded up to 16. The
kernels of GPUs (DecodeOps.contiguous) read keys and values [pages, page, K, d], with a page per row and per prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_brorl.algo.advantages import Moments
from megatron_brorl.algo.policy_loss import PolicyLoss, PolicyLossSettings, PolicyTokens

PAGE = 16  # tokens


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of everything that is not a matrix: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class ValueLoss:
    """The critic's loss and its metrics, which add up or merge over micro-batches and ranks."""

    loss: Tensor  # scalar, differentiable in values
    sums: dict[str, float]  # loss, clipped (tokens whose gradient the clipping removed), tokens (unmasked)
    returns: Moments  # over unmasked tokens
    residuals: Moments  # of returns - values; algo.advantages.explained_variance takes both


@dataclass(frozen=True, kw_only=True)
class RowPages:
    """Pages of the rows of one decoding step."""

    tables: Tensor  # [B, n] int32: the pages of the row's own tokens
    lengths: Tensor  # [B] int64: own tokens, the new one included
    prompts: Tensor  # [B] int64: the row's prompt; ascending if DecodeOps.contiguous, else fastest if so
    prompt_tables: Tensor  # [S, n] int32
    prompt_lengths: Tensor  # [S] int64
    largest_group: int = 0  # maximum number of rows of a prompt; only read if DecodeOps.contiguous


@dataclass(frozen=True, kw_only=True)
class DecodeBatch(RowPages):
    """Positions and pages of the rows of one decoding step, the same for all layers."""

    cos: Tensor  # [B, d / 2] float32 of each row's position
    sin: Tensor


@dataclass(frozen=True)
class HeadNorms:
    """Weights of the normalization of query and key heads (Qwen3), [d] float32 each."""

    q: Tensor
    k: Tensor
    eps: float


class DecodeOps(Protocol):
    @property
    def linear_logits(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Return Backend.linear_logits for bfloat16, or None where a copy of the weight in float32 is faster."""

    @property
    def contiguous(self) -> bool:
        """Return whether the keys of a row or of a prompt are in one page of any size, see the module."""

    def takes(self, dtype: torch.dtype, head_dim: int) -> bool:
        """Return whether attend computes this dtype and head size; ReferenceDecode takes all."""

    def prepare(self, batch: DecodeBatch, page: int, queries_per_key: int) -> DecodeBatch:
        """Return the batch with everything that attend derives from it, computed once for all layers.

        page: tokens of a page. queries_per_key: query heads of a kv head.
        """

    def attend(
        self, qkv: Tensor, norms: HeadNorms | None, keys: Tensor, values: Tensor, batch: DecodeBatch, scale: float
    ) -> Tensor:
        """Write each row's new key and value to its place, then attend to the row's prompt and own tokens.

        qkv [B, (heads + 2 K) d] before normalization and rotation -> [B, heads d].
        """

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """x [B, H] += delta, in place, and x / rms(x) * weight (Zhang & Sennrich 2019, eq. 4)."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[B, 2 F] -> [B, F]: silu of the first half times the second (Shazeer 2020)."""


class Backend(Protocol):
    """The ops. The functions of the same names in ops.reference document formulas, shapes and sources."""

    @property
    def decode(self) -> DecodeOps:
        """Return the ops of the built-in engine's decoder."""

    @property
    def fused_layers(self) -> bool:
        """Return whether trained layers use ops.fused.layers instead of Megatron's modules."""

    def linear_log_probs(
        self,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        temperature: float,
        group: dist.ProcessGroup | None = None,
        vocab: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """hidden [R, H], weight [V/tp, H], ids [R] -> log-probabilities and entropies [R] in nats, differentiable."""

    def linear_ppo_loss(
        self,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        tokens: PolicyTokens,
        settings: PolicyLossSettings,
        temperature: float,
        group: dist.ProcessGroup | None = None,
        vocab: int | None = None,
    ) -> PolicyLoss:
        """hidden [R, H], weight [V/tp, H], ids [R] -> the policy loss, a scalar; allows one backward pass."""

    def linear_logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """hidden [K, H], weight [V, H] -> logits [K, V] in at least float32, without gradient."""

    def value_loss(
        self, values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, clip: float
    ) -> ValueLoss:
        """The critic's loss of R tokens, all tensors [R]; differentiable in values."""

    def gae(
        self, rewards: Tensor, values: Tensor, starts: Tensor, gamma: float = 1.0, lam: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """rewards and values [T] of segments that begin at starts [S + 1] -> advantages and returns [T]."""

    def moments(self, values: Tensor) -> Moments:
        """Return the moments of a tensor of any shape; waits for the device."""

    def whiten(self, values: Tensor, batch: Moments) -> Tensor:
        """(values - mean) / std of the global batch, of the shape of values, which may be overwritten."""

    def sample_tokens(
        self,
        logits: Tensor,
        keys: Tensor,
        index: Tensor,
        position: Tensor,
        temperature: float,
        top_p: float = 1.0,
        top_k: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """logits [B, V]; keys, index and position [B] int64 -> ids [B] int64 and their log-probabilities [B]."""
