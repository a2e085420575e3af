"""Copies of tensors in host memory, which stays from one checkpoint to the next: new pages cost more than the copying.

At most one copy of what a rank writes; pinned where the tensors are on a GPU.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor


class HostCopies:
    """The memory of one state at a time."""

    def __init__(self) -> None:
        self._taken: list[Tensor] = []
        self._free: dict[tuple[object, ...], list[Tensor]] = defaultdict(list)

    def begin(self) -> None:
        """Of another state from here on: what was taken is nobody's any more."""
        for copy in self._taken:
            self._free[_kind(copy)].append(copy)
        self._taken = []

    def take(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of the same shape and type; of a GPU's tensor, complete when the device has done it."""
        free = self._free[_kind(tensor)]
        pinned = tensor.device.type != "cpu"
        copy = free.pop() if free else torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        self._taken.append(copy)
        return copy.copy_(tensor.detach(), non_blocking=pinned)

    def end(self) -> None:
        """Give back what this state had no use for."""
        self._free.clear()

    def bytes(self) -> int:
        """Held at present."""
        return sum(t.numel() * t.element_size() for part in (self._taken, *self._free.values()) for t in part)


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype
