"""Memory of keys and values in pages of 16 tokens: rows of any length, and memory follows the tokens alive."""

from __future__ import annotations

import psutil
import torch
from torch import Tensor

from megatron_brorl.model_shape import ModelShape
from megatron_brorl.ops.decode import PAGE


def pages_for(tokens: int) -> int:
    """Pages that so many tokens take, or memory positions of so many channels in steps of a page."""
    return -(-tokens // PAGE)


class PagePool:
    """Pages of all layers; page p is keys[layer][p] and values[layer][p]."""

    def __init__(self, shape: ModelShape, pages: int, dtype: torch.dtype, device: torch.device) -> None:
        """pages: how many. Untouched ones take no memory on a CPU: the system gives it page by page."""
        s, width = shape, pages_for(shape.head_dim) * PAGE
        self.size = pages
        self.keys = [
            torch.empty(pages, s.kv_heads, s.head_dim, PAGE, dtype=dtype, device=device) for _ in range(s.layers)
        ]
        self.values = [torch.empty(pages, s.kv_heads, PAGE, width, dtype=dtype, device=device) for _ in range(s.layers)]
        self.reset()

    def reset(self) -> None:
        """All pages are free."""
        # The last page that was given back is the next to be taken: its memory is there already.
        self._free = torch.arange(self.size - 1, -1, -1, dtype=torch.int32)
        self.free = self.size
        # Of the turns since: how many there were, and the pages in use, at most and added up.
        self.turns = self.most_used = self.used_sum = 0

    def count_turn(self) -> None:
        """Note how many pages are in use."""
        used = self.size - self.free
        self.turns, self.most_used, self.used_sum = self.turns + 1, max(self.most_used, used), self.used_sum + used

    def take(self, count: int) -> Tensor:
        """count pages [count] int32 on the CPU; there must be so many."""
        assert count <= self.free
        taken = self._free[self.free - count : self.free].flip(0)
        self.free -= count
        return taken

    def give(self, pages: Tensor) -> None:
        """Take pages [any number] int32 back."""
        self._free[self.free : self.free + len(pages)] = pages.flip(0)
        self.free += len(pages)


def page_bytes(shape: ModelShape, dtype: torch.dtype) -> int:
    """Bytes of one page in all layers."""
    width = pages_for(shape.head_dim) * PAGE
    return shape.layers * shape.kv_heads * PAGE * (shape.head_dim + width) * dtype.itemsize


def spare_memory(device: torch.device) -> int:
    """Half of the bytes that nobody uses now: what the cache may take where no limit is set."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    return psutil.virtual_memory().available // 2
