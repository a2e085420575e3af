"""Scheduling of rows: which are decoded now, which wait, and which make room.

Rows enter as others end. Where pages run out, the rows that came last give theirs back and wait to continue from the
tokens they have. Random numbers are a function of (key, sibling, position), so the tokens do not change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_brorl.ops.interface import PAGE, DecodeBatch
from megatron_brorl.rollout.engine import Request, Sampling, Supply, extended
from megatron_brorl.rollout.native.decoder import Decoder, PrefillChunk
from megatron_brorl.rollout.native.pages import BLOCK, PagePool, PrefixCache, pages_for
from megatron_brorl.types import FinishReason, Rollout

PREFILL_TOKENS = 8192  # computed at once, padding included


@dataclass(frozen=True)
class WaitingRollout:
    """A rollout that has no slot yet, or had to give up its own."""

    request: int
    so_far: Rollout  # without tokens at first
    limit: int  # tokens at which this call cuts it: by sampling.budget, or sampling.max_tokens


class Scheduler:
    """Slots 0 .. max_rows - 1 hold the rows in flight; `active` [B] lists them, siblings side by side."""

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

        # Per slot.
        slots = min(max_rows, len(self.waiting) + (supply.rows if supply else 0))
        self.free_slots = list(range(slots - 1, -1, -1))
        self.active = torch.empty(0, dtype=torch.int64)
        self.held: list[WaitingRollout | None] = [None] * slots  # what each slot was given to
        names = torch.zeros(6, slots, dtype=torch.int64)
        self.request, self.prompt, self.sibling, self.key, self.produced, self.limit = names
        self.tokens = torch.empty(slots, sampling.max_tokens, dtype=torch.int64)
        self.log_probs = torch.empty(slots, sampling.max_tokens)
        self.tables = torch.zeros(
            slots, pages_for(sampling.max_tokens), dtype=torch.int32
        )  # pages of a row's own tokens

        # Per prompt, which is in memory once for all requests that have it, from its first row to its last.
        self.prefixes = PrefixCache(pool)
        longest = max((len(r.prompt.token_ids) for r in requests), default=0)
        longest = max(longest, supply.prompt_tokens if supply else 0)
        self.prompt_tables = torch.zeros(0, pages_for(longest), dtype=torch.int32)
        self.prompt_lengths = torch.zeros(0, dtype=torch.int64)  # 0: not in memory
        self.prompt_hidden: dict[int, Tensor] = {}
        self.rows_left: list[int] = []  # rows that have not ended; at 0 the prompt's pages are free again
        self.prompt_numbers: dict[tuple[int, ...], int] = {}  # by tokens
        self.prompts: list[tuple[int, ...]] = []  # tokens by number
        self.prompt_of: list[int] = []  # the number of each request's
        self._number_prompts(requests)

    def free_rows(self) -> int:
        """Return how many rows could begin now: slots, and pages for half of the longest response each."""
        if self.waiting:
            return 0
        return min(len(self.free_slots), self.pool.free // (pages_for(self.sampling.max_tokens) // 2 + 1))

    def add(self, requests: Sequence[Request]) -> None:
        """Add requests, numbered on from those before; their rows wait."""
        self.waiting.extend(_waiting(requests, self.sampling, len(self.requests)))
        self.requests += requests
        self._number_prompts(requests)

    def _number_prompts(self, requests: Sequence[Request]) -> None:
        """Number the prompt of each request, with places in the tables for new ones."""
        for r in requests:
            number = self.prompt_numbers.setdefault(r.prompt.token_ids, len(self.prompt_numbers))
            self.prompt_of.append(number)
            if number == len(self.rows_left):
                self.rows_left.append(0)
                self.prompts.append(r.prompt.token_ids)
            self.rows_left[number] += r.n
        new = len(self.rows_left) - len(self.prompt_lengths)
        self.prompt_tables = torch.cat(
            (self.prompt_tables, self.prompt_tables.new_zeros(new, self.prompt_tables.shape[1]))
        )
        self.prompt_lengths = torch.cat((self.prompt_lengths, self.prompt_lengths.new_zeros(new)))

    def admit(self) -> Tensor:
        """Let rows in while there are slots and pages; returns the hidden states [new rows, H] to draw from next."""
        new: list[int] = []
        chunks: list[PrefillChunk] = []
        owner: list[tuple[str, int]] = []  # of each chunk: a prompt's number, or a slot
        while self.waiting and self.free_slots:
            # It needs pages for its prompt, unless a sibling has it in memory, and for its own tokens.
            first = self.waiting[0]
            prompt = self.requests[first.request].prompt.token_ids
            number = self.prompt_of[first.request]
            begun = len(first.so_far.token_ids)
            resident = int(self.prompt_lengths[number]) > 0
            of_prompt = 0 if resident else self.prefixes.pages_needed(prompt)
            own = pages_for(begun)

            # Keep one page per row free for the next tokens, so that no row has to make room right after this one
            # enters. A single row needs no reserve, because the pool can hold any one row.
            others = len(self.active) + len(new)
            if others and self.pool.free < of_prompt + own + 1 + others:
                break  # no row overtakes, or a long prompt would never get in
            self.waiting.popleft()

            found = len(prompt)  # prompt tokens that others have computed
            if not resident:
                pages, found = self.prefixes.add(prompt)
                self.prompt_tables[number, : len(pages)] = pages
                self.prompt_lengths[number] = len(prompt)
                chunks.append(PrefillChunk(prompt[found:], 0, pages[found // PAGE :], pages[: found // PAGE]))
                owner.append(("prompt", number))
            slot = self._assign_slot(first, begun)
            # A row that was cut or made room has tokens of its own. The unshared part of its prompt is computed again
            # with them, but only what follows the prompt is stored.
            if begun:
                shared = (len(prompt) - 1) // BLOCK * BLOCK
                found = min(found, shared)
                pages = self.pool.allocate(own)
                self.tables[slot, :own] = pages
                ids = (*prompt, *first.so_far.token_ids.tolist())
                before = self.prompt_tables[number, : shared // PAGE]
                chunks.append(PrefillChunk(ids[shared:], len(prompt) - shared, pages, before))
                owner.append(("row", slot))
            self.pool.count_prompt(len(prompt), found)
            new.append(slot)

        if not new:
            return self.decoder.embedding.new_empty(0, self.decoder.shape.hidden)

        # Prefill: all siblings without tokens draw from the last hidden state of their prompt.
        of_row: dict[int, Tensor] = {}
        for part in _batches(chunks):
            hidden = self.decoder.prefill(self.pool, [chunks[i] for i in part])
            for i, h in zip(part, hidden, strict=True):
                kind, number = owner[i]
                (self.prompt_hidden if kind == "prompt" else of_row)[number] = h

        # Append new rows at the end, because reserve_pages evicts rows from there.
        self.active = torch.cat((self.active, torch.tensor(new)))
        return torch.stack([of_row[s] if s in of_row else self.prompt_hidden[int(self.prompt[s])] for s in new])

    def _assign_slot(self, waiting: WaitingRollout, begun: int) -> int:
        """Give a waiting rollout a slot."""
        slot = self.free_slots.pop()
        self.held[slot] = waiting
        self.request[slot] = waiting.request
        self.sibling[slot] = waiting.so_far.index
        self.prompt[slot] = self.prompt_of[waiting.request]
        self.key[slot] = self.requests[waiting.request].key
        self.produced[slot] = begun
        self.limit[slot] = waiting.limit
        self.tokens[slot, :begun] = waiting.so_far.token_ids
        self.log_probs[slot, :begun] = waiting.so_far.log_probs
        return slot

    def append(self, new: Tensor, log_probs: Tensor) -> None:
        """Append the next token of every active row: new [B] int64, log_probs [B] float32."""
        place = self.produced[self.active]
        self.tokens[self.active, place], self.log_probs[self.active, place] = new, log_probs
        self.produced[self.active] = place + 1

    def remove(self, gone: Tensor, finish: Sequence[FinishReason]) -> list[tuple[int, Rollout]]:
        """Remove the given places [gone] of `active`, and return their results as (request, rollout)."""
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
        """Give a page to every active row whose newest token needs one; returns how many rows stay.

        The first rows stay, and the others wait again.
        """
        place = self.produced[self.active] - 1
        full_page = place % PAGE == 0
        while int(full_page.sum()) > self.pool.free:
            slot = int(self.active[-1])
            holder = self.held[slot]
            assert holder is not None
            assert len(self.active) > 1  # the pool holds any one row
            self.waiting.appendleft(WaitingRollout(holder.request, self._rollout(slot, "cut"), holder.limit))
            self._release(slot)
            self.active = self.active[:-1]
            full_page = full_page[:-1]
            place = place[:-1]
            if not bool((self.prompt[self.active] == self.prompt[slot]).any()):
                self._forget_prompt(int(self.prompt[slot]))

        rows = self.active[full_page]
        self.tables[rows, place[full_page] // PAGE] = self.pool.allocate(len(rows))
        return len(self.active)

    def decode_batch(self) -> DecodeBatch:
        """Return the places of the active rows on the decoder's device; each has its newest token to be fed."""
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
        holder = self.held[slot]
        end = int(self.produced[slot])
        assert holder is not None
        before = holder.so_far
        spans = extended(before.spans, self.version, end - len(before.token_ids))
        # Clones, so that a short response does not keep the whole buffer alive.
        ids, log_probs = self.tokens[slot, :end].clone(), self.log_probs[slot, :end].clone()
        return Rollout(before.index, ids, log_probs, finish, spans)

    def _release(self, slot: int) -> None:
        """Free a slot and the pages of all its tokens but the newest, which has none yet."""
        self.pool.release(self.tables[slot, : pages_for(int(self.produced[slot]) - 1)])
        self.held[slot] = None
        self.free_slots.append(slot)

    def _end_row(self, prompt: int) -> None:
        self.rows_left[prompt] -= 1
        if not self.rows_left[prompt]:
            self._forget_prompt(prompt)

    def _forget_prompt(self, prompt: int) -> None:
        if self.prompt_hidden.pop(prompt, None) is None:
            return
        length = int(self.prompt_lengths[prompt])
        self.prefixes.remove(self.prompts[prompt], self.prompt_tables[prompt, : pages_for(length)].clone())
        self.prompt_lengths[prompt] = 0


def _waiting(requests: Sequence[Request], sampling: Sampling, first: int = 0) -> Iterable[WaitingRollout]:
    for i, request in enumerate(requests, start=first):
        for so_far in request.rollouts():
            budget = len(so_far.token_ids) + sampling.budget if sampling.budget else sampling.max_tokens
            yield WaitingRollout(i, so_far, min(budget, sampling.max_tokens))


def _batches(chunks: Sequence[PrefillChunk]) -> list[list[int]]:
    """Batch chunks of like length with equally much before them, up to PREFILL_TOKENS a batch.

    Those with less before them come first, because others have them before theirs.
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
