"""Arguments and results of the ops, which are everything that training and sampling compute apart from the layers.

The built-in engine keeps keys and values in pages. With B rows of one new token each, S prompts, K kv heads and head
size d, a page of 16 tokens has keys [pages, K, d, 16] and values [pages, K, 16, d'], with d' = d rounded up to 16. The
kernels of GPUs (DecodeOps.contiguous) read keys and values [pages, page, K, d], with a page per row and per prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_brorl.algo.advantages import Moments

Group: TypeAlias = "dist.ProcessGroup | None"  # ranks that share the vocabulary; None: one rank has all of it
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
    prompts: Tensor  # [B] int64: the row's prompt; must ascend if DecodeOps.contiguous; ascending is fastest otherwise
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
