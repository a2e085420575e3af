"""Scheduling of rollouts: which are decoded now, which are queued, and which are evicted.

Queued rollouts start as others end. If pages run out, the rows that started last give up their pages and go back to the
queue. They continue later from the tokens that they have. Random numbers are a function of (Request.key, Rollout.index,
position), so a continued row draws the same ones. Its tokens change only if rounding differs in the attention keys and
values that are computed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_brorl.ops.interface import RowPages
from megatron_brorl.rollout.engine import Request, Sampling, Supply, extend_spans, turn_start
from megatron_brorl.rollout.native.decoder import Decoder, PrefillChunk
from megatron_brorl.rollout.native.pages import BLOCK, PagePool, PrefixCache
from megatron_brorl.types import FinishReason, Rollout

PREFILL_TOKENS = 8192  # tokens per prefill batch, including padding and the stored tokens before each chunk


@dataclass(frozen=True)
class QueuedRollout:
    """A rollout that has not started in this call, or was evicted."""

    request: int  # index of its request
    so_far: Rollout  # tokens of earlier calls, or from before its eviction
    limit: int  # response length at which it stops


@dataclass(eq=False)
class Scheduler:
    """Assigns rollouts to slots and pages.

    Row: a rollout that is being decoded. Slot: an index into the slot_* state below, which holds one row or is free.
    `active` [B] lists the slots of the rows; the row that started last is at the end. Page: the keys and values of PAGE
    tokens, the unit of allocation. Block: BLOCK tokens of a prompt; prompts share pages only in whole blocks. "cut":
    the finish reason of a rollout that a call of generate leaves unfinished. A later call may continue it.
    """

    decoder: Decoder
    pool: PagePool
    requests: list[Request]
    sampling: Sampling
    max_rows: int
    version: int
    supply: Supply | None = None  # the source of requests that may be added later

    def __post_init__(self) -> None:
        pool, requests, sampling, supply = self.pool, self.requests, self.sampling, self.supply
        self.queue = deque(_queued(requests, sampling))

        # State per slot.
        slots = min(self.max_rows, len(self.queue) + (supply.rows if supply else 0))
        self.free_slots = list(range(slots - 1, -1, -1))
        self.active = torch.empty(0, dtype=torch.int64)
        self.slot_rollout: list[QueuedRollout | None] = [None] * slots  # the rollout as it entered the slot
        self.slot_request, self.slot_prompt, self.slot_rollout_index = torch.zeros(3, slots, dtype=torch.int64)
        self.slot_key, self.slot_length, self.slot_limit = torch.zeros(3, slots, dtype=torch.int64)
        self.slot_turn = torch.zeros(slots, dtype=torch.int64)  # start of the text in which stop strings are searched
        self.slot_tokens = torch.empty(slots, sampling.max_tokens, dtype=torch.int64)  # the first slot_length are valid
        self.slot_log_probs = torch.empty(slots, sampling.max_tokens)
        self.slot_pages = torch.zeros(slots, pool.pages_for(sampling.max_tokens), dtype=torch.int32)  # of the response
        self.slot_page_count = torch.zeros(slots, dtype=torch.int64)

        # State per distinct prompt. The KV cache holds one copy of a prompt for all its requests, from the start of its
        # first rollout to the end of its last one, or until eviction leaves none of its rollouts active.
        self.prefixes = PrefixCache(pool, sampling.shares_prefixes)
        longest = max((len(r.prompt.token_ids) for r in requests), default=0)
        longest = max(longest, supply.prompt_tokens if supply else 0)
        self.prompts: list[tuple[int, ...]] = []  # tokens
        self.prompt_pages = torch.zeros(0, pool.pages_for(longest), dtype=torch.int32)
        self.prompt_lengths = torch.zeros(0, dtype=torch.int64)  # 0: not in the KV cache
        self.prompt_hidden: dict[int, Tensor] = {}  # [H], of the last token of each prompt in the KV cache
        self.prompt_unfinished: list[int] = []  # number of rollouts that have not ended
        self.prompt_index: dict[tuple[int, ...], int] = {}  # index in `prompts`, by tokens
        self.request_prompt: list[int] = []  # index in `prompts`, by request
        self.withdrawable: set[int] = set()  # requests that may be withdrawn
        self.has_strings = False  # whether a request has stop strings of its own
        self._register(requests)

    def room(self) -> int:
        """Return how many more rollouts could start now, if each needs half of the pages of max_tokens."""
        if self.queue:
            return 0
        return min(len(self.free_slots), self.pool.free // (self.pool.pages_for(self.sampling.max_tokens) // 2 + 1))

    def add(self, requests: Sequence[Request]) -> None:
        """Append requests, and queue their rollouts."""
        self.queue.extend(_queued(requests, self.sampling, len(self.requests)))
        self.requests += requests
        self._register(requests)

    def _register(self, requests: Sequence[Request]) -> None:
        """Assign an index to the prompt of each request, and extend the state for new prompts."""
        for request in requests:
            if request.withdrawn is not None:
                self.withdrawable.add(len(self.request_prompt))
            self.has_strings |= bool(request.stop_strings)
            tokens = request.prompt.token_ids
            prompt = self.prompt_index.setdefault(tokens, len(self.prompts))
            self.request_prompt.append(prompt)
            if prompt == len(self.prompts):
                self.prompts.append(tokens)
                self.prompt_unfinished.append(0)
            self.prompt_unfinished[prompt] += request.n
        new = len(self.prompts) - len(self.prompt_lengths)
        self.prompt_pages = torch.cat((self.prompt_pages, self.prompt_pages.new_zeros(new, self.prompt_pages.shape[1])))
        self.prompt_lengths = torch.cat((self.prompt_lengths, self.prompt_lengths.new_zeros(new)))

    def admit(self) -> Tensor:
        """Start queued rollouts while there are slots and pages; return hidden states [new rows, H] to sample from."""
        slots: list[int] = []
        chunks: list[PrefillChunk] = []
        slot_hidden: dict[int, Tensor] = {}
        outputs: list[tuple[dict[int, Tensor], int]] = []  # dict and key that receive the hidden state of each chunk
        # Start rollouts in order, so that short prompts do not starve a long prompt.
        while self.queue and self.free_slots and self._fits(self.queue[0], len(slots)):
            queued = self.queue.popleft()
            prompt = self.request_prompt[queued.request]
            prompt_tokens = self.prompts[prompt]
            cached = len(prompt_tokens)
            if not self.prompt_lengths[prompt]:
                pages, cached = self.prefixes.add(prompt_tokens)
                self.prompt_pages[prompt, : len(pages)] = pages
                self.prompt_lengths[prompt] = len(prompt_tokens)
                before, new_pages = pages.tensor_split([cached // self.pool.page])
                ids = prompt_tokens[cached:]
                chunks.append(PrefillChunk(ids, store_from=0, pages=new_pages, offset=cached, before=before))
                outputs.append((self.prompt_hidden, prompt))

            slot = self._assign_slot(queued)
            response = queued.so_far.token_ids.tolist()
            # A continued rollout has response tokens. Its chunk starts with the block that contains the prompt's last
            # token and attends to the blocks before it. Only the keys and values of the response are stored.
            # The prompt's tokens after the first `reused` tokens are computed again, so they do not count as cached.
            if response:
                reused = (len(prompt_tokens) - 1) // BLOCK * BLOCK
                cached = min(cached, reused)
                chunk = PrefillChunk(
                    (*prompt_tokens[reused:], *response),
                    store_from=len(prompt_tokens) - reused,
                    pages=self.slot_pages[slot, : self.pool.pages_for(len(response))].clone(),
                    offset=reused,
                    before=self.prompt_pages[prompt, : self.pool.pages_for(reused)],
                )
                chunks.append(chunk)
                outputs.append((slot_hidden, slot))
            self.pool.prompt_tokens += len(prompt_tokens)
            self.pool.cached_prompt_tokens += cached
            slots.append(slot)

        if not slots:
            return self.decoder.embedding.new_empty(0, self.decoder.shape.hidden)

        for batch in _batches(chunks, equal=self.sampling.turn_tokens > 0):
            hidden = self.decoder.prefill(self.pool, [chunks[i] for i in batch])
            for i, h in zip(batch, hidden, strict=True):
                states, key = outputs[i]
                states[key] = h

        # Append new rows, because reserve_pages evicts rows from the end.
        self.active = torch.cat((self.active, torch.tensor(slots)))
        # All rows without tokens sample from the hidden state of their prompt's last token.
        return torch.stack(
            [slot_hidden[s] if s in slot_hidden else self.prompt_hidden[int(self.slot_prompt[s])] for s in slots]
        )

    def _fits(self, queued: QueuedRollout, started: int) -> bool:
        """Return whether there are enough pages to start a rollout, after `started` other new rows."""
        prompt = self.request_prompt[queued.request]
        needed = self._first_pages(queued)
        if not self.prompt_lengths[prompt]:
            needed += self.prefixes.pages_needed(self.prompts[prompt])
        # Reserve a free page per row, so that admission does not trigger an eviction. A single row needs no reserve,
        # because the pool can hold any one row. With contiguous pages, a row gets all of its memory when it starts.
        other_rows = len(self.active) + started
        if not other_rows and self.pool.free < needed:
            self._remove_idle_prompts(prompt)
        return not other_rows or self.pool.free >= needed + (0 if self.pool.contiguous else 1 + other_rows)

    def _first_pages(self, queued: QueuedRollout) -> int:
        """Return how many pages a rollout gets when it starts."""
        return 1 if self.pool.contiguous else self.pool.pages_for(len(queued.so_far.token_ids))

    def _assign_slot(self, queued: QueuedRollout) -> int:
        slot = self.free_slots.pop()
        length = len(queued.so_far.token_ids)
        self.slot_rollout[slot] = queued
        self.slot_request[slot] = queued.request
        self.slot_rollout_index[slot] = queued.so_far.index
        self.slot_prompt[slot] = self.request_prompt[queued.request]
        self.slot_key[slot] = self.requests[queued.request].key
        self.slot_length[slot] = length
        self.slot_limit[slot] = queued.limit
        self.slot_turn[slot] = turn_start(queued.so_far)
        pages = self.pool.allocate(self._first_pages(queued))
        self.slot_pages[slot, : len(pages)] = pages
        self.slot_page_count[slot] = len(pages)
        self.slot_tokens[slot, :length] = queued.so_far.token_ids
        self.slot_log_probs[slot, :length] = queued.so_far.log_probs
        return slot

    def append(self, new: Tensor, log_probs: Tensor) -> None:
        """Write the newest token of every active row, which slot_length counts: new, log_probs [B]."""
        position = self.slot_length[self.active] - 1
        self.slot_tokens[self.active, position] = new
        self.slot_log_probs[self.active, position] = log_probs

    def remove(self, ended: Tensor, reasons: Sequence[FinishReason]) -> list[tuple[int, Rollout]]:
        """Remove the rows at indices `ended` of `active` and return their results as (request, rollout)."""
        results = []
        for slot, reason in zip(self.active[ended].tolist(), reasons, strict=True):
            prompt = int(self.slot_prompt[slot])
            results.append((int(self.slot_request[slot]), self._rollout(slot, reason)))
            self._release(slot)
            self.prompt_unfinished[prompt] -= 1
            if not self.prompt_unfinished[prompt]:
                self._remove_prompt(prompt)
        kept = torch.ones(len(self.active), dtype=torch.bool)
        kept[ended] = False
        self.active = self.active[kept]
        return results

    def withdrawn(self) -> Tensor:
        """Drop the queued rollouts of withdrawn requests. Return which active rows are withdrawn, [B] bool."""
        withdrawn = {i for i in self.withdrawable if (event := self.requests[i].withdrawn) and event.is_set()}
        self.withdrawable -= withdrawn
        for queued in [queued for queued in self.queue if queued.request in withdrawn]:
            self.queue.remove(queued)
            self.prompt_unfinished[self.request_prompt[queued.request]] -= 1
        return torch.isin(self.slot_request[self.active], torch.tensor(sorted(withdrawn), dtype=torch.int64))

    def unfinished(self) -> list[tuple[int, Rollout]]:
        """Return the active rollouts as "cut", then the queued ones unchanged, as (request, rollout)."""
        active = [(int(self.slot_request[slot]), self._rollout(slot, "cut")) for slot in self.active.tolist()]
        return active + [(queued.request, queued.so_far) for queued in self.queue]

    def reserve_pages(self) -> None:
        """Allocate a page for every active row whose newest token needs one.

        If pages run out, rows are evicted from the end of `active` and go to the front of the queue.
        """
        position = self.slot_length[self.active] - 1
        needs_page = position // self.pool.page >= self.slot_page_count[self.active]
        if int(needs_page.sum()) > self.pool.free:
            self._remove_idle_prompts()
        while int(needs_page.sum()) > self.pool.free:
            slot = int(self.active[-1])
            evicted = self.slot_rollout[slot]
            assert evicted is not None
            assert len(self.active) > 1  # the pool holds any one row
            self.queue.appendleft(QueuedRollout(evicted.request, self._rollout(slot, "cut"), evicted.limit))
            self._release(slot)
            self.active = self.active[:-1]
            needs_page = needs_page[:-1]
            position = position[:-1]
            if not bool((self.slot_prompt[self.active] == self.slot_prompt[slot]).any()):
                self._remove_prompt(int(self.slot_prompt[slot]))

        rows = self.active[needs_page]
        self.slot_pages[rows, self.slot_page_count[rows]] = self.pool.allocate(len(rows))
        self.slot_page_count[rows] += 1

    def row_pages(self, rows: Tensor) -> RowPages:
        """Return the pages of rows [B] (slots) on the CPU, for a decode step that feeds the newest token of each."""
        # Rows of a prompt are adjacent, because they start in the order of the requests.
        prompts, group, counts = self.slot_prompt[rows].unique_consecutive(return_inverse=True, return_counts=True)
        lengths = self.slot_length[rows]
        return RowPages(
            tables=self.slot_pages[rows, : self.pool.pages_for(int(lengths.max()))],
            lengths=lengths,
            prompts=group,
            prompt_tables=self.prompt_pages[prompts],
            prompt_lengths=self.prompt_lengths[prompts],
            largest_group=int(counts.max()),
        )

    def _rollout(self, slot: int, finish: FinishReason) -> Rollout:
        queued = self.slot_rollout[slot]
        end = int(self.slot_length[slot])
        assert queued is not None
        before = queued.so_far
        spans = extend_spans(before.spans, self.version, end - len(before.token_ids))
        # Clone, because the next rollout in this slot overwrites the buffer.
        ids, log_probs = self.slot_tokens[slot, :end].clone(), self.slot_log_probs[slot, :end].clone()
        routes = None
        if self.sampling.routes and end:
            prompt = self.slot_prompt[slot]
            prompt_routes = self.pool.routes_of(self.prompt_pages[prompt], int(self.prompt_lengths[prompt]))
            # The newest token may not have passed through the model yet.
            routes = torch.cat((prompt_routes, self.pool.routes_of(self.slot_pages[slot], end - 1)))
        return Rollout(before.index, ids, log_probs, finish, spans, before.episode, routes)

    def _release(self, slot: int) -> None:
        """Free a slot and its pages."""
        self.pool.release(self.slot_pages[slot, : int(self.slot_page_count[slot])])
        self.slot_rollout[slot] = None
        self.free_slots.append(slot)

    def _remove_idle_prompts(self, needed: int = -1) -> None:
        """Remove all prompts but `needed` that no active row has; their rollouts are queued."""
        in_use = {needed, *self.slot_prompt[self.active].tolist()}
        for prompt in [p for p in self.prompt_hidden if p not in in_use]:
            self._remove_prompt(prompt)

    def _remove_prompt(self, prompt: int) -> None:
        """Remove a prompt from the KV cache."""
        del self.prompt_hidden[prompt]
        length = int(self.prompt_lengths[prompt])
        self.prefixes.remove(self.prompts[prompt], self.prompt_pages[prompt, : self.pool.pages_for(length)].clone())
        self.prompt_lengths[prompt] = 0


def _queued(requests: Sequence[Request], sampling: Sampling, first: int = 0) -> Iterable[QueuedRollout]:
    for i, request in enumerate(requests, start=first):
        for so_far in request.rollouts():
            new_tokens = min(sampling.new_tokens, request.max_tokens or sampling.max_tokens)
            limit = min(len(so_far.token_ids) + new_tokens, sampling.max_tokens)
            yield QueuedRollout(i, so_far, limit)


def _batches(chunks: Sequence[PrefillChunk], equal: bool) -> list[list[int]]:
    """Batch chunks of similar length and with the same number of tokens before them, up to PREFILL_TOKENS a batch.

    Chunks with fewer tokens before them come first, because they may compute pages that later chunks attend to. equal:
    chunks of a batch must have the same length, because padding changes the last bits of attention. With turns, the
    composition of batches depends on the time that environments take.
    """
    batches: list[list[int]] = [[]]
    sizes = [(c.offset, len(c.ids)) for c in chunks]
    for i in sorted(range(len(chunks)), key=lambda i: sizes[i]):
        before, tokens = sizes[i]
        batch = batches[-1]
        full = (len(batch) + 1) * (before + tokens) > PREFILL_TOKENS
        if batch and (full or sizes[batch[0]][0] != before or (equal and sizes[batch[0]] != sizes[i])):
            batches.append([])
        batches[-1].append(i)
    return [b for b in batches if b]
