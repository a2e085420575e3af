"""Generation of one step on engines with a clock of tokens: the project's dealing, pulling and handing on, in virtual
time."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from megatron_brorl.rollout.engine import Held, Request
from megatron_brorl.rollout.handing import Handing
from megatron_brorl.rollout.pulling import Pulled, Waiting
from megatron_brorl.rollout.sampler import Slot
from megatron_brorl.types import Prompt, Rollout

How = Literal["dealt", "pulled", "handed on"]
_PROMPT = Prompt("simulated", "", (0,), None, "exact")


@dataclass(frozen=True)
class Clock:
    """What an engine takes its time over, in times that a decoding step takes over the keys and values of one row."""

    fixed: float = 0.0  # per step, however many rows it has: reading the weights
    prefill: float = 0.0  # per token of a row that is handed on: its keys and values are computed anew
    speeds: Sequence[float] = ()  # of each engine; empty: all 1
    interval: float = 1000.0  # between two looks of an engine at what others have

    def step(self, engine: int, rows: int) -> float:
        """Time of a decoding step of so many rows."""
        return (self.fixed + rows) / self.speed(engine)

    def speed(self, engine: int) -> float:
        """How much an engine does in a time of 1."""
        return self.speeds[engine] if self.speeds else 1.0


@dataclass
class _Engine:
    """Rows in flight by the step in which they end, and how many steps were done at what time."""

    supply: Pulled
    waiting: deque[int] = field(default_factory=deque)  # numbers of requests that are here already
    ends: list[tuple[int, int]] = field(default_factory=list)  # (step, number of the request)
    steps: int = 0
    time: float = 0.0  # when so many were done
    done: float = 0.0  # when it had no row the last time
    idle: float = 0.0  # time without a row before that
    events: int = 0  # the number of the one that counts: what was foreseen before a row went or came does not


class Step:
    """One step's generation."""

    def __init__(
        self, lengths: np.ndarray, parts: Sequence[Sequence[Slot]], in_flight: int, clock: Clock, how: How
    ) -> None:
        """lengths: tokens [groups, N]. parts: slots dealt to each engine. in_flight: rows of an engine at a time.

        how: engines sample what they were dealt; or take what waits (rollout.pulling); or hand on rows that are half
        done as well, when nothing waits any more (rollout.handing).
        """
        self.lengths, self.in_flight, self.clock, self.how, self.now = lengths, in_flight, clock, how, 0.0
        self.longest = int(lengths.max())
        store = dist.HashStore()
        self.engines = [_Engine(self._supply(store, parts, rank)) for rank in range(len(parts))]
        self.sampled: list[list[Slot]] = [[] for _ in parts]  # who ended what
        self.foreseen: list[tuple[float, int, int, int]] = []  # time, engine, event, steps

    @property
    def handed_on(self) -> tuple[int, int]:
        """Rows that were handed on, and tokens that were computed again for it."""
        every = [e.supply.handing for e in self.engines]
        return sum(h.handed_on for h in every), sum(h.tokens_again for h in every)

    def run(self) -> tuple[np.ndarray, float]:
        """The time that each engine had work [engines], and when the last was done."""
        # At the start all begin their own; then whoever's row ends next, or who looks next, is next.
        for i in range(len(self.engines)):
            self._turn(i)
        while self.foreseen:
            self.now, i, number, steps = heapq.heappop(self.foreseen)
            e = self.engines[i]
            if number == e.events:
                e.time, e.steps = self.now, steps
                self._end_rows(i)
                self._turn(i)
        return np.array([e.done - e.idle for e in self.engines]), max(e.done for e in self.engines)

    def _supply(self, store: dist.Store, parts: Sequence[Sequence[Slot]], rank: int) -> Pulled:
        groups: list[int] = []

        def asked(slots: Sequence[Slot], begun: Mapping[Slot, Rollout]) -> list[Request]:
            groups.extend(group for group, _ in slots)
            return [Request(_PROMPT, 0, 1, slot[1], tuple(filter(None, [begun.get(slot)]))) for slot in slots]

        world, total = len(parts), sum(map(len, parts))
        handing = Handing(store, "step", total, world, self.longest, self.clock.interval, lambda: self.now)
        # Dealt: as if every rank had a queue of its own.
        waiting = Waiting(dist.HashStore(), "step", [parts[rank]], 0)
        if self.how != "dealt":
            waiting = Waiting(store, "step", parts, rank)
        return Pulled(waiting, handing, asked, [], groups, total, 1)

    def _end_rows(self, i: int) -> None:
        e = self.engines[i]
        while e.ends and e.ends[0][0] == e.steps:
            self.sampled[i].append(self._slot(e, heapq.heappop(e.ends)[1]))
            e.done = e.time

    def _turn(self, i: int) -> None:
        """What an engine does between two tokens."""
        e = self.engines[i]
        if self.how == "handed on":
            self._give(e)

        # Until nothing comes; what is computed again takes the time of all of its rows.
        idle, before = not e.ends, -1
        while before < len(e.ends) < self.in_flight:
            before = len(e.ends)
            first = len(e.supply.requests)
            room = self.in_flight - before
            if self.how == "handed on" or e.supply.waiting.left:
                e.supply.take(room, before)
            for number in range(first, len(e.supply.requests)):
                self._begin(i, number)
        if idle and e.ends:
            e.idle += self.now - e.done
        self._foresee(i)

    def _begin(self, i: int, number: int) -> None:
        e = self.engines[i]
        begun = sum(len(r.token_ids) for r in e.supply.requests[number].begun)
        heapq.heappush(e.ends, (e.steps + int(self.lengths[self._slot(e, number)]) - begun, number))
        e.time += self.clock.prefill * begun / self.clock.speed(i)

    def _give(self, e: _Engine) -> None:
        """Stop what others have asked for."""
        requests = e.supply.requests

        def tokens(end: int, number: int) -> int:
            return int(self.lengths[self._slot(e, number)]) - (end - e.steps)

        def held() -> list[Held]:
            return [Held(n, requests[n].first, tokens(end, n), requests[n].hands) for end, n in e.ends]

        chosen = {row.request: row.tokens for row in e.supply.excess(len(e.ends), held)}
        if chosen:
            given = [(n, requests[n].first, torch.zeros(count, dtype=torch.int64)) for n, count in chosen.items()]
            e.supply.give([(n, Rollout(sibling, ids, ids.float(), "cut")) for n, sibling, ids in given])
            e.ends = [(end, number) for end, number in e.ends if number not in chosen]
            heapq.heapify(e.ends)

    def _foresee(self, i: int) -> None:
        """The next end of a row, or the step at whose end it looks at what others have."""
        e = self.engines[i]
        e.events += 1
        looks = self.how == "handed on"
        look = e.supply.handing.look_at(self.in_flight - len(e.ends), len(e.ends)) if looks else np.inf
        if e.ends:
            step = self.clock.step(i, len(e.ends))
            steps = e.ends[0][0] - e.steps
            if look < np.inf:
                steps = min(steps, max(1, int(np.ceil(max(look - e.time, 0.0) / step))))
            heapq.heappush(self.foreseen, (e.time + steps * step, i, e.events, e.steps + steps))
        elif looks and not e.supply.over():
            heapq.heappush(self.foreseen, (max(look, self.now), i, e.events, e.steps))

    def _slot(self, e: _Engine, number: int) -> Slot:
        return e.supply.groups[number], e.supply.requests[number].first
