"""Selection of rows of a tensor, with a gradient that repeats bit for bit on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class RepeatedRows:
    """An index [n] int64 of a tensor's rows, which may repeat rows and omit others.

    The gradients of a row are summed in the order of the index, on a GPU in float32. Those of index_select would be
    summed there in any order, in the tensor's dtype.
    """

    index: Tensor
    rows: int

    def select(self, x: Tensor) -> Tensor:
        """x [rows, ...] -> [n, ...]."""
        return _Select.apply(x, self)

    @cached_property
    def readers(self) -> tuple[Tensor, Tensor]:
        """The places in the index, sorted by row, and the first of each row in that order."""
        order = self.index.argsort(stable=True)
        return order, torch.searchsorted(self.index[order], torch.arange(self.rows, device=order.device))


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, selection: RepeatedRows) -> Tensor:
        ctx.selection = selection
        return x.index_select(0, selection.index)

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> tuple[Tensor, None]:
        total = torch.embedding_bag(grad[0].flatten(1), *ctx.selection.readers)[0]
        return total.view(-1, *grad[0].shape[1:]), None
