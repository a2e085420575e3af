"""Scheduling of rows: which are decoded now, which wait, and which are evicted.

New rows start as others end. If pages run out, the rows that started last release theirs and wait, to continue later
from the tokens they have. Random numbers are a function of (key, sibling, position), so eviction does not change the
tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_brorl.ops.interface import PAGE, DecodeBatch
from megatron_brorl.rollout.engine import Request, Sampling, Supply, extend_spans
from megatron_brorl.rollout.native.decoder import Decoder, PrefillChunk
from megatron_brorl.rollout.native.pages import BLOCK, PagePool, PrefixCache, pages_for
from megatron_brorl.types import FinishReason, Rollout

PREFILL_TOKENS = 8192  # tokens per prefill batch, padding included


@dataclass(frozen=True)
class WaitingRollout:
    """A rollout that has no slot yet or was evicted from its slot."""

    request: int
    so_far: Rollout  # empty at first
    limit: int  # number of tokens at which this call stops: the budget or max_tokens, if that is smaller


class Scheduler:
    """Assigns rows, which are rollouts in progress, to slots 0 .. max_rows - 1; `active` [B] lists the used slots."""

    def __init__(
        self,
        decoder: Decoder,
        pool: PagePool,
        requests: Sequence[Request],
        sampling: Sampling,
        max_rows: int,
        version: int,
        supply: Supply | None = None,
    ) -> None:
        """supply: the source of requests that may be added later."""
        self.decoder = decoder
        self.pool = pool
        self.requests = list(requests)
        self.version = version
        self.sampling = sampling
        self.waiting = deque(_waiting(requests, sampling))

        # State per slot.
        slots = min(max_rows, len(self.waiting) + (supply.rows if supply else 0))
        self.free_slots = list(range(slots - 1, -1, -1))
        self.active = torch.empty(0, dtype=torch.int64)
        self.held: list[WaitingRollout | None] = [None] * slots  # the rollout that each slot started with
        columns = torch.zeros(6, slots, dtype=torch.int64)  # The names below are views of one value per slot, [slots].
        self.request, self.prompt, self.sibling, self.key, self.produced, self.limit = columns
        self.tokens = torch.empty(slots, sampling.max_tokens, dtype=torch.int64)
        self.log_probs = torch.empty(slots, sampling.max_tokens)
        own_pages = pages_for(sampling.max_tokens)
        self.tables = torch.zeros(slots, own_pages, dtype=torch.int32)  # pages of each row's own tokens

        # State per prompt. The KV cache holds one copy of a prompt for all its requests, from the start of its first
        # row to the end of its last one.
        self.prefixes = PrefixCache(pool)
        longest = max((len(r.prompt.token_ids) for r in requests), default=0)
        longest = max(longest, supply.prompt_tokens if supply else 0)
        self.prompt_tables = torch.zeros(0, pages_for(longest), dtype=torch.int32)
        self.prompt_lengths = torch.zeros(0, dtype=torch.int64)  # 0: not in memory
        self.prompt_hidden: dict[int, Tensor] = {}
        self.rows_left: list[int] = []  # rows that have not ended; at 0 the prompt is removed
        self.prompt_numbers: dict[tuple[int, ...], int] = {}  # by tokens
        self.prompts: list[tuple[int, ...]] = []  # tokens by number
        self.prompt_of: list[int] = []  # prompt number of each request
        self._number_prompts(requests)

    def free_rows(self) -> int:
        """Return how many rows could start now, if each needs half of the pages of a response of max_tokens."""
        if self.waiting:
            return 0
        return min(len(self.free_slots), self.pool.free // (pages_for(self.sampling.max_tokens) // 2 + 1))

    def add(self, requests: Sequence[Request]) -> None:
        """Append requests; their rows wait."""
        self.waiting.extend(_waiting(requests, self.sampling, len(self.requests)))
        self.requests += requests
        self._number_prompts(requests)

    def _number_prompts(self, requests: Sequence[Request]) -> None:
        """Number the prompt of each request, and extend the tables for new prompts."""
        for request in requests:
            tokens = request.prompt.token_ids
            number = self.prompt_numbers.setdefault(tokens, len(self.prompts))
            self.prompt_of.append(number)
            if number == len(self.prompts):
                self.rows_left.append(0)
                self.prompts.append(tokens)
            self.rows_left[number] += request.n
        new = len(self.rows_left) - len(self.prompt_lengths)
        self.prompt_tables = torch.cat(
            (self.prompt_tables, self.prompt_tables.new_zeros(new, self.prompt_tables.shape[1]))
        )
        self.prompt_lengths = torch.cat((self.prompt_lengths, self.prompt_lengths.new_zeros(new)))

    def admit(self) -> Tensor:
        """Start waiting rows while there are slots and pages; return hidden states [new rows, H] to sample from."""
        slots: list[int] = []
        chunks: list[PrefillChunk] = []
        owners: list[tuple[str, int]] = []  # of each chunk: ("prompt", its number) or ("row", its slot)
        # Start rows in order, so that short prompts do not starve a long one.
        while self.waiting and self.free_slots and self._fits(self.waiting[0], len(slots)):
            waiting = self.waiting.popleft()
            number = self.prompt_of[waiting.request]
            prompt = self.prompts[number]
            computed = len(prompt)  # prompt tokens that other rows have computed
            if not self.prompt_lengths[number]:
                pages, computed = self.prefixes.add(prompt)
                self.prompt_tables[number, : len(pages)] = pages
                self.prompt_lengths[number] = len(prompt)
                first = computed // PAGE
                chunks.append(PrefillChunk(prompt[computed:], 0, pages[first:], pages[:first]))
                owners.append(("prompt", number))

            slot = self._assign_slot(waiting)
            produced = waiting.so_far.token_ids.tolist()
            # A row that was cut or evicted has tokens of its own. A chunk can attend only to full blocks before it, so
            # the last, incomplete block of the prompt is computed again with these tokens. Only the keys and values of
            # the row's own tokens are stored.
            if produced:
                shared = (len(prompt) - 1) // BLOCK * BLOCK
                computed = min(computed, shared)
                pages = self.pool.allocate(pages_for(len(produced)))
                self.tables[slot, : len(pages)] = pages
                tokens = (*prompt[shared:], *produced)
                before = self.prompt_tables[number, : shared // PAGE]
                chunks.append(PrefillChunk(tokens, len(prompt) - shared, pages, before))
                owners.append(("row", slot))
            self.pool.count_prompt(len(prompt), computed)
            slots.append(slot)

        if not slots:
            return self.decoder.embedding.new_empty(0, self.decoder.shape.hidden)

        # All rows without tokens sample from the last hidden state of their prompt.
        row_hidden: dict[int, Tensor] = {}
        for part in _batches(chunks):
            hidden = self.decoder.prefill(self.pool, [chunks[i] for i in part])
            for i, h in zip(part, hidden, strict=True):
                kind, number = owners[i]
                (self.prompt_hidden if kind == "prompt" else row_hidden)[number] = h

        # Append new rows, because reserve_pages evicts rows from the end.
        self.active = torch.cat((self.active, torch.tensor(slots)))
        return torch.stack(
            [row_hidden[s] if s in row_hidden else self.prompt_hidden[int(self.prompt[s])] for s in slots]
        )

    def _fits(self, waiting: WaitingRollout, started: int) -> bool:
        """Return whether there are enough pages to start a rollout, after `started` other new rows."""
        number = self.prompt_of[waiting.request]
        prompt_pages = 0 if self.prompt_lengths[number] else self.prefixes.pages_needed(self.prompts[number])
        own_pages = pages_for(len(waiting.so_far.token_ids))
        # Reserve a free page per row, so that admission does not trigger an eviction. A single row needs no reserve,
        # because the pool can hold any one row.
        others = len(self.active) + started
        return not others or self.pool.free >= prompt_pages + own_pages + 1 + others

    def _assign_slot(self, waiting: WaitingRollout) -> int:
        slot = self.free_slots.pop()
        produced = len(waiting.so_far.token_ids)
        self.held[slot] = waiting
        self.request[slot] = waiting.request
        self.sibling[slot] = waiting.so_far.index
        self.prompt[slot] = self.prompt_of[waiting.request]
        self.key[slot] = self.requests[waiting.request].key
        self.produced[slot] = produced
        self.limit[slot] = waiting.limit
        self.tokens[slot, :produced] = waiting.so_far.token_ids
        self.log_probs[slot, :produced] = waiting.so_far.log_probs
        return slot

    def append(self, new: Tensor, log_probs: Tensor) -> None:
        """Append the next token of every active row: new [B] int64, log_probs [B] float32."""
        position = self.produced[self.active]
        self.tokens[self.active, position] = new
        self.log_probs[self.active, position] = log_probs
        self.produced[self.active] = position + 1

    def remove(self, gone: Tensor, finish: Sequence[FinishReason]) -> list[tuple[int, Rollout]]:
        """Remove the rows at indices `gone` of `active` and return their results as (request, rollout)."""
        results = []
        for slot, reason in zip(self.active[gone].tolist(), finish, strict=True):
            prompt = int(self.prompt[slot])
            results.append((int(self.request[slot]), self._rollout(slot, reason)))
            self._release(slot)
            self._end_row(prompt)
        kept = torch.ones(len(self.active), dtype=torch.bool)
        kept[gone] = False
        self.active = self.active[kept]
        return results

    def unfinished(self) -> list[tuple[int, Rollout]]:
        """Return the active rollouts as "cut", then the waiting ones unchanged, as (request, rollout)."""
        active = [(int(self.request[slot]), self._rollout(slot, "cut")) for slot in self.active.tolist()]
        return active + [(w.request, w.so_far) for w in self.waiting]

    def reserve_pages(self) -> int:
        """Allocate a page for every active row whose newest token needs one; return how many rows remain active.

        If pages run out, rows are evicted from the end and wait again.
        """
        position = self.produced[self.active] - 1
        needs_page = position % PAGE == 0
        while int(needs_page.sum()) > self.pool.free:
            slot = int(self.active[-1])
            evicted = self.held[slot]
            assert evicted is not None
            assert len(self.active) > 1  # the pool holds any one row
            self.waiting.appendleft(WaitingRollout(evicted.request, self._rollout(slot, "cut"), evicted.limit))
            self._release(slot)
            self.active = self.active[:-1]
            needs_page = needs_page[:-1]
            position = position[:-1]
            if not bool((self.prompt[self.active] == self.prompt[slot]).any()):
                self._forget_prompt(int(self.prompt[slot]))

        rows = self.active[needs_page]
        self.tables[rows, position[needs_page] // PAGE] = self.pool.allocate(len(rows))
        return len(self.active)

    def decode_batch(self) -> DecodeBatch:
        """Return the inputs of a decode step that feeds the newest token of each active row."""
        active = self.active
        device = self.decoder.device
        prompts = self.prompt[active]
        lengths = self.produced[active]
        cos, sin = self.decoder.angles((self.prompt_lengths[prompts] + lengths - 1).to(device))
        used = pages_for(int(lengths.max()))
        return DecodeBatch(
            cos=cos,
            sin=sin,
            tables=self.tables[active, :used].to(device),
            lengths=lengths.to(device),
            prompts=prompts.to(device),
            prompt_tables=self.prompt_tables.to(device),
            prompt_lengths=self.prompt_lengths.to(device),
        )

    def _rollout(self, slot: int, finish: FinishReason) -> Rollout:
        waiting = self.held[slot]
        end = int(self.produced[slot])
        assert waiting is not None
        before = waiting.so_far
        spans = extend_spans(before.spans, self.version, end - len(before.token_ids))
        # Clone, so that a short response does not keep the whole buffer alive.
        ids, log_probs = self.tokens[slot, :end].clone(), self.log_probs[slot, :end].clone()
        return Rollout(before.index, ids, log_probs, finish, spans)

    def _release(self, slot: int) -> None:
        """Free a slot and its pages. The newest token's keys and values are not stored yet."""
        self.pool.release(self.tables[slot, : pages_for(int(self.produced[slot]) - 1)])
        self.held[slot] = None
        self.free_slots.append(slot)

    def _end_row(self, prompt: int) -> None:
        self.rows_left[prompt] -= 1
        if not self.rows_left[prompt]:
            self._forget_prompt(prompt)

    def _forget_prompt(self, prompt: int) -> None:
        if self.prompt_hidden.pop(prompt, None) is None:
            return  # It is not in memory.
        length = int(self.prompt_lengths[prompt])
        self.prefixes.remove(self.prompts[prompt], self.prompt_tables[prompt, : pages_for(length)].clone())
        self.prompt_lengths[prompt] = 0


def _waiting(requests: Sequence[Request], sampling: Sampling, first: int = 0) -> Iterable[WaitingRollout]:
    for i, request in enumerate(requests, start=first):
        for so_far in request.rollouts():
            budget = len(so_far.token_ids) + sampling.budget if sampling.budget else sampling.max_tokens
            yield WaitingRollout(i, so_far, min(budget, sampling.max_tokens))


def _batches(chunks: Sequence[PrefillChunk]) -> list[list[int]]:
    """Batch chunks of similar length and with the same number of pages before them, up to PREFILL_TOKENS a batch.

    Chunks with fewer pages before them come first, because later chunks may attend to them.
    """
    batches: list[list[int]] = [[]]
    sizes = [(len(p.before), len(p.ids)) for p in chunks]
    for i in sorted(range(len(chunks)), key=lambda i: sizes[i]):
        before, tokens = sizes[i]
        others = batches[-1]
        full = (len(others) + 1) * (before * PAGE + tokens) > PREFILL_TOKENS
        if others and (full or sizes[others[0]][0] != before):
            batches.append([])
        batches[-1].append(i)
    return [b for b in batches if b]
