"""Decoding steps as CUDA graphs, which start the hundreds of kernels of a step with one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_brorl.ops.interface import RowPages
from megatron_brorl.rollout.native.decoder import Decoder
from megatron_brorl.rollout.native.pages import PagePool, to_device

# Numbers of rows of the graphs, as fractions of the maximum. Other numbers are padded to the next one.
FRACTIONS = (1, 3 / 4, 1 / 2, 3 / 8, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256)


@dataclass(frozen=True)
class _Graph:
    numbers: Tensor  # [3 rows + 2 prompts] int64, see _numbers
    ids: Tensor  # [rows] int64
    replay: Callable[[], Tensor]  # returns the hidden states [rows, H], which the next call overwrites


class StepGraphs:
    """Decoder.step for one decoder and one contiguous page pool.

    A graph is recorded when its size occurs for the second time. It holds as long as the decoder's weights and the pool
    stay where they are in memory.
    """

    def __init__(self, decoder: Decoder, pool: PagePool, max_rows: int) -> None:
        self.decoder = decoder
        self.pool = pool
        self._rows = sorted({-int(-max_rows * f // 1) for f in FRACTIONS})
        self._memory = torch.cuda.graph_pool_handle() if decoder.device.type == "cuda" else None
        self._seen: set[tuple[int, int, int]] = set()
        self._graphs: dict[tuple[int, int, int], _Graph] = {}

    def step(self, pages: RowPages, ids: Tensor) -> Tensor:
        """Return Decoder.step(pages, ids). pages: on the CPU. A later call overwrites the result."""
        count = len(ids)
        # Upper bounds that seldom change. The kernels start a block for each of them, and most end at once.
        prompts, largest = (1 << (n - 1).bit_length() for n in (len(pages.prompt_lengths), pages.largest_group))
        size = rows, prompts, largest = next(n for n in self._rows if n >= count), prompts, largest
        if size not in self._seen:
            self._seen.add(size)
            return self.decoder.step(self.pool, move(pages, ids.device), ids)

        numbers = to_device(_numbers(pages, rows, prompts, self.pool.size), ids.device)
        graph = self._graphs.get(size)
        if graph is not None:
            graph.numbers.copy_(numbers)
            graph.ids[:count] = ids
            return graph.replay()[:count]

        # A first pass outside of the graph loads the kernels and allocates their workspaces.
        padded = pad(ids, (0, rows - count))
        tables, lengths, groups, prompt_tables, prompt_lengths = numbers.split([rows] * 3 + [prompts] * 2)
        padded_pages = RowPages(
            tables=tables.unsqueeze(1),
            lengths=lengths,
            prompts=groups,
            prompt_tables=prompt_tables.unsqueeze(1),
            prompt_lengths=prompt_lengths,
            largest_group=largest,
        )
        hidden = self.decoder.step(self.pool, padded_pages, padded)
        replay = record(lambda: self.decoder.step(self.pool, padded_pages, padded), self._memory)
        self._graphs[size] = _Graph(numbers, padded, replay)
        return hidden[:count]


def move(pages: RowPages, device: torch.device) -> RowPages:
    """Return the pages on a device."""
    columns: dict[str, Any] = dict(vars(pages))
    columns |= {name: to_device(x, device) for name, x in columns.items() if isinstance(x, Tensor)}
    return RowPages(**columns)


def record(run: Callable[[], Tensor], memory: Any) -> Callable[[], Tensor]:
    """Record the kernels of `run` without executing them. Return a function that executes them and returns the result.

    memory: from torch.cuda.graph_pool_handle, the same for graphs that are executed one after the other.
    """
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as one that writes a checkpoint, may use the device meanwhile.
    with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
        result = run()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def _numbers(pages: RowPages, rows: int, prompts: int, unused_page: int) -> Tensor:
    """Return page, length and prompt of each row, and page and length of each prompt, as [3 rows + 2 prompts] int64.

    Rows of padding have a token of their own in a page that nothing else uses, because attention to no token is NaN.
    """
    last = len(pages.prompt_lengths) - 1
    columns = (
        (pages.tables[:, 0], rows, unused_page),
        (pages.lengths, rows, 1),
        (pages.prompts, rows, last),  # in ascending order
        (pages.prompt_tables[:, 0], prompts, unused_page),
        (pages.prompt_lengths, prompts, 1),
    )
    return torch.cat([pad(x.long(), (0, size - len(x)), value=value) for x, size, value in columns])
