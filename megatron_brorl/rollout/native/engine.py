"""The built-in rollout engine, for any device, with shared prompts and continuous batching."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from megatron_brorl.errors import UserError
from megatron_brorl.families.shape import ModelShape
from megatron_brorl.ops.interface import DecodeOps
from megatron_brorl.ops.reference.decode import ReferenceDecode
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
from megatron_brorl.rollout.native.pages import PagePool, page_bytes, pages_for, spare_memory
from megatron_brorl.rollout.native.scheduler import Scheduler
from megatron_brorl.rollout.native.stopping import StopCriteria
from megatron_brorl.rollout.weight_receiver import receive
from megatron_brorl.types import FinishReason, Rollout

SAMPLED_ROWS = 128  # rows sampled at a time, so that their logits stay in a CPU's cache


class TorchEngine:
    """A RolloutEngine with a full copy of the model on one device."""

    def __init__(
        self,
        shape: ModelShape,
        names: dict[str, tuple[int, ...]],
        device: torch.device,
        dtype: torch.dtype,
        max_rows: int,
        sample: SampleTokens,
        ops: DecodeOps | None = None,
        memory: int = 0,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """names: every Hugging Face tensor of the model, with its shape. max_rows: rollouts decoded at a time.

        sample, ops: the ops of config key ops.implementation. memory: bytes for keys and values; 0 = half of the free
        memory. decode: tokens -> text, for stop strings.
        """
        self.shape = shape
        self.names = names
        self.device = device
        self.dtype = dtype
        self.max_rows = max_rows
        self.sample = sample
        self.ops = ops or ReferenceDecode()
        self.memory = memory
        self.decode = decode
        self.version = -1
        self._decoder: Decoder | None = None
        self._pool: PagePool | None = None

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See RolloutEngine."""
        received = receive(tensors, self.names, self.device, self.dtype)
        self._decoder = Decoder(self.shape, received, self.dtype, self.ops)
        self.version = version

    @property
    def duplicate_advice(self) -> str:
        """See RolloutEngine. Keys never repeat, so duplicates would be a bug of the sampler."""
        return (
            'the built-in engine (rollout.engine = "torch"); install megatron-brorl again, or start again with the '
            "other ops.implementation"
        )

    def kv_bytes(self) -> int:
        """Return the bytes of all pages in use."""
        pool = self._pool
        return 0 if pool is None else (pool.size - pool.free) * page_bytes(self.shape, self.dtype)

    def skip_update(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See RolloutEngine."""
        for _ in tensors:  # producing each tensor is a collective
            pass

    def barrier(self) -> None:
        """See RolloutEngine: no other rank shares this engine."""

    def kv_usage(self) -> KvUsage | None:
        """See RolloutEngine."""
        pool = self._pool
        if pool is None or not pool.steps:
            return None
        mean = pool.used_sum / pool.steps / pool.size
        return KvUsage(pool.max_used / pool.size, mean, pool.steps, pool.prompt_tokens, pool.cached_prompt_tokens)

    def restart(self, why: str) -> bool:
        """Return False, because this engine does not run in a separate process; see RolloutEngine."""
        return False

    def sleep(self) -> None:
        """See RolloutEngine."""
        self._decoder = self._pool = None
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
        scheduler = Scheduler(decoder, pool, requests, sampling, self.max_rows, self.version, supply)
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
        request_more()
        hidden = scheduler.admit()
        while not (callbacks and callbacks.cancelled()):
            # Without active rows, wait for the supply.
            if not len(scheduler.active):
                if not (supply and supply.has_more()):
                    break
                request_more()
                hidden = scheduler.admit()
                continue

            pool.record_step()
            deliver(self._advance(scheduler, hidden, stops, sampling))

            # Feed the new token of the rows that continue; then start queued rollouts in the free slots.
            remaining = scheduler.reserve_pages()
            hidden = decoder.embedding.new_empty(0, self.shape.hidden)
            if remaining:
                new = scheduler.slot_tokens[scheduler.active, scheduler.slot_length[scheduler.active] - 1]
                hidden = decoder.step(pool, scheduler.decode_batch(), new.to(self.device))

            # New rows are last in `hidden` and in scheduler.active.
            request_more()
            if scheduler.queue and scheduler.free_slots:
                hidden = torch.cat((hidden, scheduler.admit()))

        # Rollouts are unfinished here only if the call was cancelled.
        deliver(scheduler.unfinished())
        return [sorted(rollouts, key=lambda x: x.index) for rollouts in results]

    def _advance(
        self, scheduler: Scheduler, hidden: Tensor, stops: StopCriteria, sampling: Sampling
    ) -> list[tuple[int, Rollout]]:
        """Sample the next token of every row and return the rollouts that ended."""
        active = scheduler.active
        new, log_probs = self._sample(scheduler, hidden, sampling)
        if bool(log_probs.isnan().any()):  # only the fused sampler raises this itself
            raise ValueError("generate: the logits of a row have NaN, +inf or nothing above -inf")

        scheduler.append(new, log_probs)
        stopped = stops.hit(new, active, scheduler.slot_tokens, scheduler.slot_length, scheduler.slot_turn)
        at_limit = scheduler.slot_length[active] >= scheduler.slot_limit[active]
        ended = (stopped | at_limit).nonzero().squeeze(-1)
        if not len(ended):
            return []

        def reason(i: int) -> FinishReason:
            if stopped[i]:
                return "stop"
            has_room = scheduler.slot_length[active[i]] < sampling.max_tokens
            return "cut" if sampling.tokens_per_call and has_room else "length"

        return scheduler.remove(ended, [reason(i) for i in ended.tolist()])

    def _sample(self, scheduler: Scheduler, hidden: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """Return token ids and log-probs [rows], on the CPU, given the hidden states [rows, H] of the active rows."""
        assert self._decoder is not None
        active = scheduler.active
        stream = (scheduler.slot_key[active], scheduler.slot_rollout_index[active], scheduler.slot_length[active])
        settings = (sampling.temperature, sampling.top_p, sampling.top_k)
        parts = zip(*(x.to(self.device).split(SAMPLED_ROWS) for x in (hidden, *stream)), strict=True)
        drawn = [self.sample(self._decoder.logits(h), k, i, p, *settings) for h, k, i, p in parts]
        ids, log_probs = (torch.cat(x).cpu() for x in zip(*drawn, strict=True))
        return ids, log_probs

    def _pages(self, requests: Sequence[Request], sampling: Sampling, supply: Supply | None) -> PagePool:
        """Return an empty pool with pages for all rows in flight, or with as many pages as fit in memory.

        Reuses the current pool if its size is suitable. Raises UserError if the longest prompt and one full
        response do not fit.
        """
        # The pool holds all prompts and a full response for each row that is decoded at a time.
        own = pages_for(sampling.max_tokens)
        prompts = [pages_for(len(r.prompt.token_ids)) for r in requests]
        rows = sum(r.n for r in requests)
        if supply:  # assume that every row of the supply has a prompt of its own
            prompts += [pages_for(supply.prompt_tokens)] * min(self.max_rows, supply.rows)
            rows += supply.rows
        needed = sum(prompts) + own * min(self.max_rows, rows)

        # Replace a pool that is much too large, too.
        if self._pool is None or self._pool.size < needed or self._pool.size > 2 * needed + 64:
            self._pool = None  # frees its memory first
            size = page_bytes(self.shape, self.dtype)
            # With fewer pages, the row with the longest prompt could not reach max_tokens.
            least = max(prompts, default=0) + own
            fitting = (self.memory or spare_memory(self.device)) // size  # pages of all layers
            if fitting < least:
                raise UserError(
                    f"rollout.kv_cache_mib: the longest prompt with one response of {sampling.max_tokens} tokens needs "
                    f"{least * size / 2**20:.0f} MiB of keys and values, and there are {fitting * size / 2**20:.0f}: "
                    "raise rollout.kv_cache_mib or lower rollout.max_tokens"
                )
            self._pool = PagePool(self.shape, min(needed, fitting), self.dtype, self.device)

        # The pool may hold prompts of an earlier call, computed with other weights.
        self._pool.reset()
        return self._pool
