"""The built-in rollout engine, for any device, with shared prompts and continuous batching."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_brorl.errors import UserError
from megatron_brorl.families.shape import ModelShape
from megatron_brorl.ops.interface import PAGE, RowPages
from megatron_brorl.ops.reference.decode import DecodeOps
from megatron_brorl.parallel.cpu_bridge import to_device
from megatron_brorl.rollout.engine import (
    GenerateCallbacks,
    KvUsage,
    Request,
    SampleTokens,
    Sampling,
    Supply,
    check_context,
)
from megatron_brorl.rollout.native.decoder import Decoder
from megatron_brorl.rollout.native.pages import BLOCK, PagePool, page_bytes, pages_for, spare_memory
from megatron_brorl.rollout.native.scheduler import Scheduler
from megatron_brorl.rollout.native.stopping import StopCriteria
from megatron_brorl.rollout.weight_stream import receive
from megatron_brorl.types import FinishReason, Rollout

SAMPLED_ROWS = 128  # rows sampled at a time on a CPU, so that their logits stay in its cache
SAMPLED_LOGITS = 1 << 28  # logits sampled at a time on a GPU
FEW_TOKENS = 16  # a call with fewer tokens records no CUDA graphs, because that takes longer than it saves
# Numbers of rows of the graphs, as fractions of the maximum. Other numbers are padded to the next larger number.
FRACTIONS = (1, 3 / 4, 1 / 2, 3 / 8, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256)


@dataclass(eq=False)
class TorchEngine:
    """A RolloutEngine with a full copy of the model on one device."""

    shape: ModelShape
    names: dict[str, tuple[int, ...]]  # every Hugging Face tensor of the model, with its shape
    device: torch.device
    dtype: torch.dtype
    max_rows: int  # rollouts decoded at a time
    sample: SampleTokens  # sample and ops: the implementation of config key ops.implementation
    ops: DecodeOps | None = None
    memory: int = 0  # bytes for keys and values; 0 = half of the free memory
    decode: Callable[[Sequence[int]], str] | None = None  # tokens -> text, for stop strings
    version: int = field(default=-1, init=False)
    _decoder: Decoder | None = field(default=None, init=False)
    _pool: PagePool | None = field(default=None, init=False)
    _graphs: StepGraphs | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._ops = DecodeOps()
        if self.ops and self.ops.takes(self.dtype, self.shape.head_dim):
            self._ops = self.ops

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        received = receive(tensors, self.names, self.device, self.dtype)
        self._graphs = None
        self._decoder = Decoder(self.shape, received, self.dtype, self._ops)
        self.version = version

    @property
    def duplicate_advice(self) -> str:
        """See RolloutEngine. Keys never repeat, so duplicates would be a bug of the sampler."""
        return (
            'the built-in engine (rollout.engine = "torch"); install megatron-brorl again, or start again with the '
            "other ops.implementation"
        )

    def skip_update(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for _ in tensors:  # producing each tensor is a collective
            pass

    def barrier(self) -> None:
        """See RolloutEngine: no other rank shares this engine."""

    def kv_usage(self) -> KvUsage | None:
        pool = self._pool
        if pool is None or not pool.steps:
            return None
        mean = pool.used_sum / pool.steps / pool.size
        return KvUsage(pool.max_used / pool.size, mean, pool.steps, pool.prompt_tokens, pool.cached_prompt_tokens)

    def restart(self, why: str) -> bool:
        """Return False, because this engine does not run in a separate process; see RolloutEngine."""
        return False

    def sleep(self) -> None:
        self._decoder = self._pool = self._graphs = None
        self.version = -1

    def wake(self) -> None:
        """See RolloutEngine: update_weights and generate allocate the memory."""

    @torch.inference_mode()
    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        callbacks: GenerateCallbacks | None = None,
        supply: Supply | None = None,
    ) -> list[list[Rollout]]:
        decoder = self._decoder
        if decoder is None:
            raise RuntimeError("the engine has no weights: call update_weights first")
        check_context(requests, sampling, supply, self.shape.context, "model's")

        stops = StopCriteria(sampling.stop_ids, sampling.stop_strings, self.decode)
        pool = self._pages(requests, sampling, supply)
        scheduler = Scheduler(decoder, pool, list(requests), sampling, self.max_rows, self.version, supply)
        results: list[list[Rollout]] = [[] for _ in requests]

        def deliver(ended: list[tuple[int, Rollout]]) -> None:
            # Do not report a "cut" rollout to the callbacks, because a later call continues it.
            for request, rollout in ended:
                results[request].append(rollout)
                if callbacks and rollout.finish != "cut":
                    callbacks.finished(request, rollout)

        def request_more() -> None:
            # Take only rollouts that can start now. Other ranks can sample the rest of the supply.
            if supply and (room := scheduler.room()):
                new = supply.next_requests(room)
                scheduler.add(new)
                results.extend([] for _ in new)

        # Each row's next token is sampled from hidden [active rows, H]. Every iteration adds one token to each row.
        # With contiguous pages, a step is started before the host knows its tokens, so that a GPU need not wait for the
        # host. A row that has just ended then computes a hidden state that is dropped.
        step_first = pool.contiguous
        request_more()
        hidden = scheduler.admit()
        while not (callbacks and callbacks.cancelled()):
            if not len(scheduler.active):
                if not (supply and supply.has_more()):
                    break
                request_more()
                hidden = scheduler.admit()
                continue

            pool.record_step()
            ids, log_probs = self._sample(scheduler, hidden, sampling)
            new, new_log_probs = HostCopy(ids), HostCopy(log_probs)
            if step_first:
                continues = scheduler.slot_length[scheduler.active] < scheduler.slot_limit[scheduler.active]
                hidden = self._step(scheduler, scheduler.active[continues], _rows(ids, continues), sampling)

            ended, kept = self._advance(scheduler, new.wait(), new_log_probs.wait(), stops, sampling)
            deliver(ended)

            # Feed the new token of the rows that continue; then start queued rollouts in the free slots.
            if step_first:
                hidden = _rows(hidden, kept[continues])
            else:
                scheduler.reserve_pages()
                fed = scheduler.slot_tokens[scheduler.active, scheduler.slot_length[scheduler.active] - 1]
                hidden = self._step(scheduler, scheduler.active, fed.to(self.device), sampling)

            # New rows are last in `hidden` and in scheduler.active.
            request_more()
            if scheduler.queue and scheduler.free_slots:
                hidden = torch.cat((hidden, scheduler.admit()))

        # Rollouts are unfinished here only if the call was cancelled.
        deliver(scheduler.unfinished())
        return [sorted(rollouts, key=lambda rollout: rollout.index) for rollouts in results]

    def _step(self, scheduler: Scheduler, rows: Tensor, ids: Tensor, sampling: Sampling) -> Tensor:
        """Feed the newest tokens ids [B] of the given rows (slots) and return the hidden states [B, H]."""
        decoder, pool = self._decoder, self._pool
        assert decoder is not None
        assert pool is not None
        if not len(rows):
            return decoder.embedding.new_empty(0, self.shape.hidden)
        pages = scheduler.row_pages(rows)
        if not decoder.can_be_recorded or sampling.new_tokens < FEW_TOKENS:
            return decoder.step(pool, move(pages, self.device), ids)
        if self._graphs is None or self._graphs.pool is not pool:
            self._graphs = StepGraphs(decoder, pool, self.max_rows)
        return self._graphs.step(pages, ids)

    def _advance(
        self, scheduler: Scheduler, new: Tensor, log_probs: Tensor, stops: StopCriteria, sampling: Sampling
    ) -> tuple[list[tuple[int, Rollout]], Tensor]:
        """Append the sampled token of every row. Return the rollouts that ended, and which rows remain [B] bool."""
        active = scheduler.active
        if bool(log_probs.isnan().any()):  # The fused sampler raises this error itself.
            raise ValueError("generate: the logits of a row have NaN, +inf or nothing above -inf")

        scheduler.append(new, log_probs)
        stopped = self._stopped(scheduler, new, stops)
        at_limit = scheduler.slot_length[active] >= scheduler.slot_limit[active]
        withdrawn = scheduler.withdrawn()
        has_ended = stopped | at_limit | withdrawn
        ended = has_ended.nonzero().squeeze(-1)

        def reason(i: int) -> FinishReason:
            if withdrawn[i]:
                return "cut"
            if stopped[i]:
                return "stop"
            has_room = scheduler.slot_length[active[i]] < sampling.max_tokens
            return "cut" if sampling.tokens_per_call and has_room else "length"

        return scheduler.remove(ended, [reason(i) for i in ended.tolist()]), ~has_ended

    def _stopped(self, scheduler: Scheduler, new: Tensor, stops: StopCriteria) -> Tensor:
        """Return whether each active row ends with its newest token, new [B], by stop tokens and strings, [B] bool."""
        active = scheduler.active
        state = scheduler.slot_tokens, scheduler.slot_length, scheduler.slot_turn
        if not scheduler.has_strings:
            return stops.hit(new, active, *state)
        row_strings = [scheduler.requests[r].stop_strings for r in scheduler.slot_request[active].tolist()]
        stopped = torch.zeros_like(active, dtype=torch.bool)
        for strings in set(row_strings):
            criteria = stops.with_strings(strings)
            rows = torch.tensor([own_strings == strings for own_strings in row_strings])
            stopped[rows] = criteria.hit(new[rows], active[rows], *state)
        return stopped

    def _sample(self, scheduler: Scheduler, hidden: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """Return the next token ids and log-probs [rows] of the active rows, and count the tokens in slot_length.

        hidden: [rows, H].
        """
        assert self._decoder is not None
        active = scheduler.active
        # Keys, indices and positions of the random numbers.
        stream = (scheduler.slot_key[active], scheduler.slot_rollout_index[active], scheduler.slot_length[active])
        scheduler.slot_length[active] += 1
        settings = (sampling.temperature, sampling.top_p, sampling.top_k)
        rows = SAMPLED_ROWS if self.device.type == "cpu" else max(1, SAMPLED_LOGITS // self.shape.vocab)
        columns = (hidden, *to_device(torch.stack(stream), self.device))
        parts = zip(*(x.split(rows) for x in columns), strict=True)
        sampled = [self.sample(self._decoder.logits(h), k, i, p, *settings) for h, k, i, p in parts]
        ids, log_probs = (torch.cat(x) for x in zip(*sampled, strict=True))
        return ids, log_probs

    def _pages(self, requests: Sequence[Request], sampling: Sampling, supply: Supply | None) -> PagePool:
        """Return an empty pool with pages for all rows in flight, or with as many pages as fit in memory.

        Reuses a pool of suitable size. Raises UserError if the longest prompt and one full response do not fit.
        """
        lengths = [len(r.prompt.token_ids) for r in requests]
        rows = sum(r.n for r in requests)
        if supply:  # assume that every row of the supply has a prompt of its own
            lengths += [supply.prompt_tokens] * min(self.max_rows, supply.rows)
            rows += supply.rows
        contiguous = self._ops.contiguous
        page = -(-max([sampling.max_tokens, *lengths]) // BLOCK) * BLOCK if contiguous else PAGE
        response_pages = pages_for(sampling.max_tokens, page)
        prompt_pages = [pages_for(n, page) for n in lengths]
        needed = sum(prompt_pages) + response_pages * min(self.max_rows, rows)

        # Replace a pool that is much too large, too.
        pool = self._pool
        if pool is None or pool.page != page or pool.size < needed or pool.size > 2 * needed + 64:
            pool = self._pool = self._graphs = None  # frees its memory first
            size = page_bytes(self.shape, self.dtype, page, contiguous)  # bytes of a page in all layers
            # With fewer pages, the row with the longest prompt could not reach max_tokens.
            min_pages = max(prompt_pages, default=0) + response_pages
            room = (self.memory or spare_memory(self.device)) // size - contiguous  # minus the page for padding
            if room < min_pages:
                raise UserError(
                    f"rollout.kv_cache_mib: the longest prompt with one response of {sampling.max_tokens} tokens needs "
                    f"{min_pages * size / 2**20:.0f} MiB of keys and values, and there are {room * size / 2**20:.0f}: "
                    "raise rollout.kv_cache_mib or lower rollout.max_tokens"
                )
            pool = PagePool(self.shape, min(needed, room), self.dtype, self.device, page, contiguous)
            self._pool = pool

        # The pool may hold prompts of an earlier call, computed with other weights.
        pool.reset()
        return pool


class HostCopy:
    """A copy of a tensor to the host, for which the device does not wait."""

    def __init__(self, x: Tensor) -> None:
        self._host = x
        self._copied: torch.cuda.Event | None = None
        if x.is_cuda:
            self._host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> Tensor:
        """Return the tensor on the CPU when it is complete."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host


def _rows(x: Tensor, chosen: Tensor) -> Tensor:
    """Return the rows of x that `chosen` [rows] bool, on the CPU, selects."""
    return x if bool(chosen.all()) else x[to_device(chosen.nonzero().squeeze(-1), x.device)]


@dataclass(frozen=True)
class _Graph:
    numbers: Tensor  # [3 rows + 2 prompts] int64, see _numbers
    ids: Tensor  # [rows] int64
    replay: Callable[[], Tensor]  # returns the hidden states [rows, H], which the next call overwrites


class StepGraphs:
    """CUDA graphs of Decoder.step for one decoder and one contiguous page pool.

    A graph is recorded when its size occurs for the second time. It holds as long as the decoder's weights and the pool
    stay where they are in memory.
    """

    def __init__(self, decoder: Decoder, pool: PagePool, max_rows: int) -> None:
        self.decoder = decoder
        self.pool = pool
        self._rows = sorted({math.ceil(max_rows * fraction) for fraction in FRACTIONS})
        self._memory = torch.cuda.graph_pool_handle() if decoder.device.type == "cuda" else None
        self._sizes_run: set[tuple[int, int, int]] = set()
        self._graphs: dict[tuple[int, int, int], _Graph] = {}

    def step(self, pages: RowPages, ids: Tensor) -> Tensor:
        """Call Decoder.step with pages on the CPU. Return its hidden states [B, H], which a later call overwrites."""
        count = len(ids)
        # Powers of two as upper bounds, which seldom change. Blocks of the kernels beyond the true numbers end at once.
        prompts, largest = (1 << (n - 1).bit_length() for n in (len(pages.prompt_lengths), pages.largest_group))
        rows = next(n for n in self._rows if n >= count)
        size = rows, prompts, largest
        if size not in self._sizes_run:
            self._sizes_run.add(size)
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
        (pages.prompts, rows, last),  # prompts stay in ascending order
        (pages.prompt_tables[:, 0], prompts, unused_page),
        (pages.prompt_lengths, prompts, 1),
    )
    return torch.cat([pad(x.long(), (0, size - len(x)), value=value) for x, size, value in columns])
