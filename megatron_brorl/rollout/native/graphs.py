"""Decoding steps as recorded graphs: on a GPU one launch for all kernels of a step.

A graph repeats what was launched, on the memory that it was launched on. So a step's rows go to fixed places, padded to
one of a few counts (at most a quarter more), their tables to a power of two of pages, and there is a graph for each of
these sizes. A padding row has one token, in a page that no other row has, behind a prompt of none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from megatron_brorl.ops.decode import Rows
from megatron_brorl.rollout.native.decoder import Decoder
from megatron_brorl.rollout.native.pages import PagePool

LEAST_PAGES = 32  # of a row's own tokens; as many as a block of csrc's kernel attends to


class Recorder(Protocol):
    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """What repeats the launches of run(), which has run before and does not wait for the device."""


class CudaRecorder:
    """CUDA graphs that share their memory, because one at a time is run."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """See Recorder."""
        graph = torch.cuda.CUDAGraph()
        # Other threads of the trainer may allocate meanwhile, which a global capture would refuse.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            run()
        replay: Callable[[], None] = graph.replay
        return replay


def padded_rows(rows: int) -> int:
    """The least of 1, 2, 3, 4 and 5, 6, 7, 8 times powers of two that is not below `rows`."""
    step = 1 << max(0, (rows - 1).bit_length() - 3)
    return -(-rows // step) * step


def padded_pages(pages: int) -> int:
    """A power of two."""
    return max(LEAST_PAGES, 1 << (pages - 1).bit_length())


class _Places:
    """What graphs read and write: memory of `rows` rows, `tables` pages of them in all, and `prompts` prompts.

    The last prompt has no token; padding rows stand behind it.
    """

    def __init__(self, decoder: Decoder, rows: int, tables: int, prompts: int, prompt_pages: int) -> None:
        device, half = decoder.device, decoder.shape.head_dim // 2
        integers = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self.ids, self.lengths, self.prompts = integers
        self.cos, self.sin = torch.zeros(2, rows, half, device=device)
        self.tables = torch.zeros(tables, dtype=torch.int32, device=device)
        self.prompt_tables = torch.zeros(prompts + 1, prompt_pages, dtype=torch.int32, device=device)
        self.prompt_lengths = torch.zeros(prompts + 1, dtype=torch.int64, device=device)
        self.hidden = torch.zeros(rows, decoder.shape.hidden, dtype=decoder.dtype, device=device)

    def sizes(self) -> tuple[int, int, int, int]:
        """As __init__ takes them."""
        prompts, prompt_pages = self.prompt_tables.shape
        return len(self.ids), len(self.tables), prompts - 1, prompt_pages

    def rows(self, count: int, pages: int) -> Rows:
        """The first `count` rows, with tables [count, pages]."""
        return Rows(
            cos=self.cos[:count],
            sin=self.sin[:count],
            tables=self.tables[: count * pages].view(count, pages),
            lengths=self.lengths[:count],
            prompts=self.prompts[:count],
            prompt_tables=self.prompt_tables,
            prompt_lengths=self.prompt_lengths,
        )

    def put(self, rows: Rows, ids: Tensor, count: int, pages: int, scratch: int) -> None:
        """Rows and ids [B] as the first of `count`; the others are padding, with their token in page `scratch`."""
        there, real = self.rows(count, pages), len(ids)
        self.ids[:real].copy_(ids)
        for name in ("cos", "sin", "lengths", "prompts"):
            getattr(there, name)[:real].copy_(getattr(rows, name))
        there.tables[:real, : rows.tables.shape[1]].copy_(rows.tables)
        prompts, prompt_pages = rows.prompt_tables.shape
        self.prompt_tables[:prompts, :prompt_pages].copy_(rows.prompt_tables)
        self.prompt_lengths[:prompts].copy_(rows.prompt_lengths)

        # What stood there belongs to rows that have ended, whose pages may be others' now.
        if real < count:
            self.ids[real:count].zero_()
            there.lengths[real:].fill_(1)
            there.prompts[real:].fill_(len(self.prompt_lengths) - 1)
            there.tables[real:, 0].fill_(scratch)


class GraphedSteps:
    """Steps of one decoder over one pool, which has a page beside those that it gives out (pool.scratch)."""

    def __init__(self, decoder: Decoder, pool: PagePool, recorder: Recorder) -> None:
        self.decoder, self.pool, self.recorder = decoder, pool, recorder
        self._places: _Places | None = None
        self._seen: set[tuple[int, int]] = set()  # sizes that have run, as whatever is recorded must have
        self._graphs: dict[tuple[int, int], Callable[[], None]] = {}

    def step(self, rows: Rows, ids: Tensor) -> Tensor:
        """As Decoder.step: the hidden states [B, H], which the next step overwrites."""
        size = count, pages = padded_rows(len(ids)), padded_pages(rows.tables.shape[1])
        places = self._fitting(count, count * pages, *rows.prompt_tables.shape)
        places.put(rows, ids, count, pages, self.pool.scratch)

        # The first time as it is, the second time recorded, and from then on repeated.
        run = partial(self._run, places, count, pages)
        if size in self._seen and size not in self._graphs:
            self._graphs[size] = self.recorder(run)
        self._seen.add(size)
        self._graphs.get(size, run)()
        return places.hidden[: len(ids)]

    def _run(self, places: _Places, count: int, pages: int) -> None:
        hidden = self.decoder.step(self.pool, places.rows(count, pages), places.ids[:count])
        places.hidden[:count].copy_(hidden)

    def _fitting(self, *sizes: int) -> _Places:
        """Memory of at least these sizes. Where it is new, graphs of the old one are of no use."""
        at_hand = self._places.sizes() if self._places else (0,) * len(sizes)
        if self._places is None or any(a < b for a, b in zip(at_hand, sizes, strict=True)):
            self._graphs.clear()
            self._seen.clear()
            self._places = None  # first, so that its memory is free
            self._places = _Places(self.decoder, *map(max, at_hand, sizes))
        return self._places
