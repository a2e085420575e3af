"""Memory of keys and values in pages of 16 tokens: rows of any length, and memory follows the tokens alive."""

from __future__ import annotations

from collections.abc import Callable

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
        """pages: how many to give out, beside one that is nobody's. Untouched ones take no memory on a CPU: the system
        gives it page by page."""
        s, width = shape, pages_for(shape.head_dim) * PAGE
        self.size = self.scratch = pages
        pages += 1
        self.keys = [
            torch.empty(pages, s.kv_heads, s.head_dim, PAGE, dtype=dtype, device=device) for _ in range(s.layers)
        ]
        self.values = [torch.empty(pages, s.kv_heads, PAGE, width, dtype=dtype, device=device) for _ in range(s.layers)]
        self.reset()

    def reset(self) -> None:
        """All pages are free."""
        # The last page that was given back is the next to be taken: its memory is there already.
        self._free = torch.arange(self.size - 1, -1, -1, dtype=torch.int32)
        self._clean = self.size  # of these
        # Pages that keep what they hold until somebody needs them, the first to be lost first; they count as free.
        self._parked: dict[int, tuple[Tensor, Callable[[], object]]] = {}
        self._parkings = 0
        self.free = self.size
        # Of the turns since: how many there were, and the pages in use, at most and added up.
        self.turns = self.most_used = self.used_sum = 0
        # Prompt tokens of the rows that came in since, and those of them that others had computed.
        self.prompt_tokens = self.prompt_found = 0

    def count_turn(self) -> None:
        """Note how many pages are in use."""
        used = self.size - self.free
        self.turns, self.most_used, self.used_sum = self.turns + 1, max(self.most_used, used), self.used_sum + used

    def count_prompt(self, tokens: int, found: int) -> None:
        """Note a row that came in; found: tokens of its prompt that it need not compute."""
        self.prompt_tokens += tokens
        self.prompt_found += found

    def take(self, count: int) -> Tensor:
        """count pages [count] int32 on the CPU; there must be so many."""
        assert count <= self.free
        while self._clean < count:
            pages, lost = self._parked.pop(next(iter(self._parked)))
            lost()
            self._put(pages)
        taken = self._free[self._clean - count : self._clean].flip(0)
        self._clean -= count
        self.free -= count
        return taken

    def give(self, pages: Tensor) -> None:
        """Take pages [any number] int32 back."""
        self._put(pages)
        self.free += len(pages)

    def park(self, pages: Tensor, lost: Callable[[], object]) -> int:
        """Take pages [any number] int32 back that may be asked for again; lost: told when they are given to others.

        Returns their name for unpark.
        """
        self._parkings += 1
        self._parked[self._parkings] = pages, lost
        self.free += len(pages)
        return self._parkings

    def unpark(self, name: int) -> None:
        """Give parked pages out again, with what they hold."""
        self.free -= len(self._parked.pop(name)[0])

    def _put(self, pages: Tensor) -> None:
        self._free[self._clean : self._clean + len(pages)] = pages.flip(0)
        self._clean += len(pages)


def page_bytes(shape: ModelShape, dtype: torch.dtype) -> int:
    """Bytes of one page in all layers."""
    width = pages_for(shape.head_dim) * PAGE
    return shape.layers * shape.kv_heads * PAGE * (shape.head_dim + width) * dtype.itemsize


def spare_memory(device: torch.device) -> int:
    """Half of the bytes that nobody uses now: what the cache may take where no limit is set."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    return psutil.virtual_memory().available // 2
