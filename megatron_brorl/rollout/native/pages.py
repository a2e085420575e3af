"""Memory of keys and values in pages of 16 tokens, and the beginnings of prompts that share pages.

Rows may have any length, and memory follows the tokens alive. A beginning that prompts of a call share, such as an
instruction, is computed once, and its pages stand in several tables. A prompt is cut into blocks of 64 tokens; a block
is known by its tokens and the block before it. Blocks that no prompt in memory has stay until their pages are needed. A
call begins without any, so that what it computes does not depend on the calls before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import psutil
import torch
from torch import Tensor

from megatron_brorl.model_shape import ModelShape
from megatron_brorl.ops.decode import PAGE

BLOCK = 64  # tokens
PAGES = BLOCK // PAGE  # in a block

_Key = tuple[int, tuple[int, ...]]  # the number of the block before, 0 for none, and the tokens


def pages_for(tokens: int) -> int:
    """Return how many pages so many tokens take."""
    return -(-tokens // PAGE)


class PagePool:
    """The pages of all layers; page p is keys[layer][p] and values[layer][p]."""

    def __init__(self, shape: ModelShape, pages: int, dtype: torch.dtype, device: torch.device) -> None:
        """pages: how many there are. On a CPU the system gives memory page by page, so untouched ones take none."""
        s, width = shape, pages_for(shape.head_dim) * PAGE
        self.size = pages
        self.keys = [
            torch.empty(pages, s.kv_heads, s.head_dim, PAGE, dtype=dtype, device=device) for _ in range(s.layers)
        ]
        self.values = [torch.empty(pages, s.kv_heads, PAGE, width, dtype=dtype, device=device) for _ in range(s.layers)]
        self.reset()

    def reset(self) -> None:
        """Free all pages."""
        # The last page that was given back is the next to be taken, because its memory is there already.
        self._free = torch.arange(self.size - 1, -1, -1, dtype=torch.int32)
        self._clean = self.size  # how many of these hold nothing
        # Parked pages keep their contents until they are needed, the first one first. They count as free.
        self._parked: dict[int, tuple[Tensor, Callable[[], object]]] = {}
        self._parkings = 0
        self.free = self.size
        # Decoding steps since, and the pages in use in them: their maximum and their sum.
        self.turns = self.most_used = self.used_sum = 0
        # Prompt tokens of the rows that came in since, and how many of them other rows had computed.
        self.prompt_tokens = self.prompt_found = 0

    def count_turn(self) -> None:
        """Record how many pages are in use."""
        used = self.size - self.free
        self.turns, self.most_used, self.used_sum = self.turns + 1, max(self.most_used, used), self.used_sum + used

    def count_prompt(self, tokens: int, found: int) -> None:
        """Record a row that came in; found: tokens of its prompt that it need not compute."""
        self.prompt_tokens += tokens
        self.prompt_found += found

    def take(self, count: int) -> Tensor:
        """Return `count` free pages [count] int32 on the CPU."""
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
        """Take pages [any number] int32 back that may be asked for again; returns a name for unpark.

        lost: called when they are given to others.
        """
        self._parkings += 1
        self._parked[self._parkings] = pages, lost
        self.free += len(pages)
        return self._parkings

    def unpark(self, name: int) -> None:
        """Give parked pages out again, with their contents."""
        self.free -= len(self._parked.pop(name)[0])

    def _put(self, pages: Tensor) -> None:
        self._free[self._clean : self._clean + len(pages)] = pages.flip(0)
        self._clean += len(pages)


@dataclass
class _Block:
    key: _Key
    number: int
    pages: Tensor  # [PAGES] int32
    prompts: int = 0  # in memory that have it
    parked: int = 0  # PagePool.park's name for its pages while there are none


class Prefixes:
    """The blocks of prompts in memory."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._blocks: dict[_Key, _Block] = {}
        self._made = 0

    def pages_needed(self, prompt: Sequence[int]) -> int:
        """Return how many free pages the prompt needs: all but those that other prompts hold."""
        return pages_for(len(prompt)) - PAGES * sum(block.prompts > 0 for block in self._found(prompt))

    def enter(self, prompt: Sequence[int]) -> tuple[Tensor, int]:
        """Return the pages of a whole prompt [n] int32, and how many of its tokens other prompts compute.

        The last token is never among these, because the first response tokens are drawn from its hidden state.
        """
        found = self._found(prompt)
        for block in found:
            if not block.prompts:
                self._pool.unpark(block.parked)

        # This prompt computes the other blocks, and later prompts find them.
        chain = list(found)
        for tokens in _cut(prompt)[len(found) :]:
            self._made += 1
            key = chain[-1].number if chain else 0, tokens
            self._blocks[key] = _Block(key, self._made, self._pool.take(PAGES))
            chain.append(self._blocks[key])
        for block in chain:
            block.prompts += 1
        rest = self._pool.take(pages_for(len(prompt)) - PAGES * len(chain))
        return torch.cat([*(block.pages for block in chain), rest]), BLOCK * len(found)

    def leave(self, prompt: Sequence[int], pages: Tensor) -> None:
        """Remove a prompt from memory; pages [n] int32: as enter gave them."""
        found = self._found(prompt)
        self._pool.give(pages[PAGES * len(found) :])

        # The last block is parked first, and so lost first: it is useless without those before it.
        for block in reversed(found):
            block.prompts -= 1
            if not block.prompts:
                block.parked = self._pool.park(block.pages, partial(self._blocks.pop, block.key))

    def _found(self, prompt: Sequence[int]) -> list[_Block]:
        """Return the prompt's blocks in memory, up to the first that is missing."""
        chain: list[_Block] = []
        for tokens in _cut(prompt):
            block = self._blocks.get((chain[-1].number if chain else 0, tokens))
            if block is None:
                break
            chain.append(block)
        return chain


def _cut(prompt: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the prompt's whole blocks, without one that would hold its last token."""
    return [tuple(prompt[i : i + BLOCK]) for i in range(0, (len(prompt) - 1) // BLOCK * BLOCK, BLOCK)]


def page_bytes(shape: ModelShape, dtype: torch.dtype) -> int:
    """Return the bytes of one page in all layers."""
    width = pages_for(shape.head_dim) * PAGE
    return shape.layers * shape.kv_heads * PAGE * (shape.head_dim + width) * dtype.itemsize


def spare_memory(device: torch.device) -> int:
    """Return half of the free bytes, which the cache may take where no limit is set."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    return psutil.virtual_memory().available // 2
