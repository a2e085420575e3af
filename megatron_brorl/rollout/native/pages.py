"""Paged memory for keys, values and chosen experts, with pages that prompts share for a common prefix.

Memory is allocated in pages of PAGE = 16 tokens, which vLLM calls blocks. A prefix that several prompts of a call share
is computed once, and their page tables refer to the same pages. To find shared prefixes, prompts are split into blocks
of BLOCK = 64 tokens. A block is identified by its tokens and the block before it. It stays while a prompt has it.

The kernels of GPUs need the keys of a row, and those of a prompt, next to one another (DecodeOps.contiguous). A page
then holds the longest prompt or response, and prompts share none.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import re
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from megatron_brorl.families.shape import ModelShape
from megatron_brorl.ops.interface import PAGE
from megatron_brorl.rollout.engine import empty_routes

BLOCK = 64  # tokens of a prompt
PROCESS, CGROUPS = Path("/proc/self"), Path("/sys/fs/cgroup")

_Key = tuple[int, tuple[int, ...]]  # number of the previous block (0 for none), and the tokens of this one


def pages_for(tokens: int, page: int = PAGE) -> int:
    """Return the number of pages that hold the given number of tokens."""
    return -(-tokens // page)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor.

    On a CPU it is a memory mapping of its own. Large blocks that come and go in every step would leave gaps in the
    heap, which never shrinks (parallel.cpu_bridge.keep_freed_memory).
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:  # A mapping cannot be empty.
        return torch.empty(shape, dtype=dtype, device=device)
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapping, dtype=dtype).view(shape)


@dataclass(eq=False)
class PagePool:
    """The pages of all layers; page p is keys[layer][p] and values[layer][p].

    On a CPU, pages that are never written take no memory.
    """

    shape: ModelShape
    size: int  # number of pages
    dtype: torch.dtype
    device: torch.device
    page: int = PAGE  # tokens of a page; PAGE unless contiguous, see DecodeOps
    contiguous: bool = False

    def __post_init__(self) -> None:
        shape, dtype, device, pages = self.shape, self.dtype, self.device, self.size
        width = pages_for(shape.head_dim) * PAGE  # head_dim, rounded up to a multiple of 16
        key_shape, value_shape = (shape.kv_heads, shape.head_dim, PAGE), (shape.kv_heads, PAGE, width)
        if self.contiguous:
            key_shape = value_shape = (self.page, shape.kv_heads, shape.head_dim)
            pages += 1  # for the rows that only pad a batch
        self.keys = [_empty((pages, *key_shape), dtype, device) for _ in range(shape.layers)]
        self.values = [_empty((pages, *value_shape), dtype, device) for _ in range(shape.layers)]
        # The experts of each token of a page in every layer; empty for a model without experts.
        routes_shape = pages, self.page, shape.layers, shape.chosen_experts
        self.routes = _empty(routes_shape, empty_routes(shape).dtype, device)
        self.reset()

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages that hold the given number of tokens."""
        return pages_for(tokens, self.page)

    def store(self, layer: int, pages: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [n, K, d] of tokens to slots [n] int64 of pages [n] int64."""
        if self.contiguous:
            self.keys[layer][pages, slots] = keys
            self.values[layer][pages, slots] = values
        else:
            self.keys[layer][pages, :, :, slots] = keys
            self.values[layer][pages, :, slots, : self.shape.head_dim] = values

    def load(self, layer: int, pages: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, K, tokens, d] of the first tokens in pages [B, n] int64."""
        keys, values = self.keys[layer][pages], self.values[layer][pages]
        if self.contiguous:  # [B, n, page, K, d]
            keys, values = (x.flatten(1, 2).transpose(1, 2) for x in (keys, values))
        else:  # [B, n, K, d, 16] and [B, n, K, 16, d']
            keys = keys.permute(0, 2, 1, 4, 3).flatten(2, 3)
            values = values[..., : self.shape.head_dim].transpose(1, 2).flatten(2, 3)
        return keys[:, :, :tokens], values[:, :, :tokens]

    def reset(self) -> None:
        """Free all pages."""
        # The page released last is allocated first, because its memory is already in use.
        self._free = torch.arange(self.size - 1, -1, -1, dtype=torch.int32)
        self.free = self.size
        # Decoding steps since the reset. Pages in use: the maximum and the sum over these steps.
        self.steps = self.max_used = self.used_sum = 0
        # Prompt tokens of the rows started since the reset, and how many of them were already in the cache.
        self.prompt_tokens = self.cached_prompt_tokens = 0

    def record_step(self) -> None:
        """Record a decoding step and how many pages are in use."""
        used = self.size - self.free
        self.steps += 1
        self.max_used = max(self.max_used, used)
        self.used_sum += used

    def allocate(self, count: int) -> Tensor:
        """Return `count` free pages [count] int32 on the CPU."""
        assert count <= self.free
        pages = self._free[self.free - count : self.free].flip(0)
        self.free -= count
        return pages

    def routes_of(self, pages: Tensor, tokens: int) -> Tensor:
        """Return the experts [tokens, layers, k] of the first tokens in the given pages [n] int32, on the CPU."""
        pages = pages[: self.pages_for(tokens)].long().to(self.routes.device)
        return self.routes[pages].flatten(0, 1)[:tokens].cpu()

    def release(self, pages: Tensor) -> None:
        """Free the given pages [n] int32."""
        self._free[self.free : self.free + len(pages)] = pages.flip(0)
        self.free += len(pages)


@dataclass
class _Block:
    key: _Key
    number: int
    pages: Tensor  # [pages of a block] int32
    prompts: int = 0  # number of prompts in memory that contain the block


class PrefixCache:
    """The blocks of the prompts in memory."""

    def __init__(self, pool: PagePool, shares: bool = True) -> None:
        """shares: whether prompts share blocks."""
        self._pool = pool
        self._block = max(BLOCK, pool.page) if shares else sys.maxsize
        self._pages_per_block = self._block // pool.page
        self._blocks: dict[_Key, _Block] = {}
        self._last_number = 0

    def pages_needed(self, prompt: Sequence[int]) -> int:
        """Return the number of pages to allocate for a prompt, without the pages that it shares."""
        return self._pool.pages_for(len(prompt)) - self._pages_per_block * len(self._cached_blocks(prompt))

    def add(self, prompt: Sequence[int]) -> tuple[Tensor, int]:
        """Add a prompt. Return its pages [n] int32, and how many of its tokens are already computed.

        The last token is never already computed, because the first response token is sampled from its hidden state.
        """
        cached = self._cached_blocks(prompt)
        # The caller computes the other blocks of this prompt; later prompts find them.
        chain = list(cached)
        for tokens in self._full_blocks(prompt)[len(cached) :]:
            self._last_number += 1
            key = (chain[-1].number if chain else 0, tokens)
            self._blocks[key] = _Block(key, self._last_number, self._pool.allocate(self._pages_per_block))
            chain.append(self._blocks[key])
        for block in chain:
            block.prompts += 1
        rest = self._pool.allocate(self._pool.pages_for(len(prompt)) - self._pages_per_block * len(chain))
        return torch.cat([*(block.pages for block in chain), rest]), self._block * len(cached)

    def remove(self, prompt: Sequence[int], pages: Tensor) -> None:
        """Remove a prompt. pages: [n] int32, as returned by add."""
        cached = self._cached_blocks(prompt)
        self._pool.release(pages[self._pages_per_block * len(cached) :])
        for block in cached:
            block.prompts -= 1
            if not block.prompts:
                self._pool.release(block.pages)
                del self._blocks[block.key]

    def _cached_blocks(self, prompt: Sequence[int]) -> list[_Block]:
        """Return the prompt's blocks in memory, up to the first that is missing."""
        chain: list[_Block] = []
        for tokens in self._full_blocks(prompt):
            block = self._blocks.get((chain[-1].number if chain else 0, tokens))
            if block is None:
                break
            chain.append(block)
        return chain

    def _full_blocks(self, prompt: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the full blocks of a prompt, without a block that contains its last token."""
        size = self._block
        return [tuple(prompt[i : i + size]) for i in range(0, (len(prompt) - 1) // size * size, size)]


def page_bytes(shape: ModelShape, dtype: torch.dtype, page: int = PAGE, contiguous: bool = False) -> int:
    """Return the bytes of one page over all layers."""
    width = shape.head_dim if contiguous else pages_for(shape.head_dim) * PAGE  # of a value, see PagePool
    routes = shape.chosen_experts * empty_routes(shape).itemsize
    return shape.layers * page * (shape.kv_heads * (shape.head_dim + width) * dtype.itemsize + routes)


def spare_memory(device: torch.device) -> int:
    """Return half of a rank's share of the free memory in bytes, which is the default size of the cache."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return host_memory(ranks)[1] // 2 // ranks  # half of the free memory


def host_memory(ranks: int) -> tuple[int, int, str]:
    """Return the memory of this node in bytes for `ranks` processes like this one: total, free, and what limits it.

    The limit is the memory of the machine, of a cgroup of version 1 or 2 (docker, Slurm, systemd), or of `ulimit -v`.
    """
    memory = psutil.virtual_memory()
    limits = [(memory.total, memory.available, "")]  # total, free, and the name of the limit
    for line in "".join(file.read_text() for file in PROCESS.glob("cgroup")).splitlines():  # The file may be absent.
        _, kind, path = line.split(":", 2)
        names = ("limit_in_bytes", "usage_in_bytes") if kind else ("max", "current")
        folder = CGROUPS / kind / path.lstrip("/")
        for ancestor in (folder, *folder.parents):
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                limit, usage = (int((ancestor / f"memory.{name}").read_text()) for name in names)
                cached = re.findall(r"inactive_file (\d+)", (ancestor / "memory.stat").read_text())[-1]
                limits.append((limit, max(0, limit - usage + int(cached)), f"{ancestor}/memory.{names[0]}"))
    process_memory, address_space = psutil.Process().memory_info(), resource.getrlimit(resource.RLIMIT_AS)[0]
    if address_space != resource.RLIM_INFINITY:
        free = max(0, address_space - process_memory.vms) * ranks
        limits.append((free + process_memory.rss * ranks, free, f"ulimit -v {address_space // 1024}"))
    total, _, reason = min(limits)
    return total, min(free for _, free, _ in limits), reason
