"""Beginnings that prompts of a call share, such as an instruction: computed once, their pages in several tables.

A prompt is cut into blocks of 64 tokens. A block is known by its tokens and the block before it, so that what is found
has the same tokens from the first one on. Blocks that no prompt in memory has stay until their pages are needed. A call
begins without any: what one call computes at once does not depend on the calls before it, nor a resumed run on where
it was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_brorl.ops.decode import PAGE
from megatron_brorl.rollout.native.pages import PagePool, pages_for

BLOCK = 64  # tokens
PAGES = BLOCK // PAGE  # of a block

_Key = tuple[int, tuple[int, ...]]  # the number of the block before, 0 for none, and the tokens


@dataclass
class _Block:
    key: _Key
    number: int
    pages: Tensor  # [PAGES] int32
    prompts: int = 0  # in memory that have it
    parked: int = 0  # PagePool.park's name for its pages while there are none


class Prefixes:
    """The blocks in memory."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._blocks: dict[_Key, _Block] = {}
        self._made = 0

    def pages_needed(self, prompt: Sequence[int]) -> int:
        """Of those that count as free: all of the prompt's but those that other prompts hold."""
        return pages_for(len(prompt)) - PAGES * sum(block.prompts > 0 for block in self._found(prompt))

    def enter(self, prompt: Sequence[int]) -> tuple[Tensor, int]:
        """Pages of a whole prompt [n] int32, and how many of its tokens are computed already, or by who came before.

        The last token is never among these: the first response tokens are drawn from what computing it gives.
        """
        found = self._found(prompt)
        for block in found:
            if not block.prompts:
                self._pool.unpark(block.parked)

        # What is not found is this prompt's to compute, and others' to find from now on.
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
        """A prompt is no longer in memory; pages [n] int32: as enter gave them."""
        found = self._found(prompt)
        self._pool.give(pages[PAGES * len(found) :])

        # From the last one on, which without those before it is of no use to anyone: it is lost first.
        for block in reversed(found):
            block.prompts -= 1
            if not block.prompts:
                block.parked = self._pool.park(block.pages, partial(self._blocks.pop, block.key))

    def _found(self, prompt: Sequence[int]) -> list[_Block]:
        """The prompt's blocks that are there, from the first to the last before one that is not."""
        chain: list[_Block] = []
        for tokens in _cut(prompt):
            block = self._blocks.get((chain[-1].number if chain else 0, tokens))
            if block is None:
                break
            chain.append(block)
        return chain


def _cut(prompt: Sequence[int]) -> list[tuple[int, ...]]:
    """The prompt's whole blocks, without one that would hold its last token."""
    return [tuple(prompt[i : i + BLOCK]) for i in range(0, (len(prompt) - 1) // BLOCK * BLOCK, BLOCK)]
