"""Generation of one step on engines with a clock of tokens: the project's dealing and pulling, in virtual time."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch.distributed as dist

from megatron_brorl.rollout.pulling import Waiting
from megatron_brorl.rollout.sampler import Slot

How = Literal["dealt", "pulled", "handed over"]


@dataclass(frozen=True)
class Clock:
    """What an engine takes its time over, in times that a decoding step takes over the keys and values of one row."""

    fixed: float = 0.0  # per step, however many rows it has: reading the weights
    prefill: float = 0.0  # per token of a row that is handed over: its keys and values are computed anew
    speeds: Sequence[float] = ()  # of each engine; empty: all 1

    def step(self, engine: int, rows: int) -> float:
        """Time of a decoding step of so many rows."""
        return (self.fixed + rows) / self.speed(engine)

    def speed(self, engine: int) -> float:
        """How much an engine does in a time of 1."""
        return self.speeds[engine] if self.speeds else 1.0


@dataclass
class _Engine:
    """Rows in flight by the step in which they end, and how many steps were done at what time."""

    waiting: deque[Slot] = field(default_factory=deque)  # that no other engine can take
    ends: list[tuple[int, Slot]] = field(default_factory=list)
    steps: int = 0
    time: float = 0.0
    events: int = 0  # the number of the one that counts: what was foreseen before a row went or came does not


class Step:
    """One step's generation."""

    def __init__(
        self, lengths: np.ndarray, parts: Sequence[Sequence[Slot]], in_flight: int, clock: Clock, how: How
    ) -> None:
        """lengths: tokens [groups, N]. parts: slots dealt to each engine. in_flight: rows of an engine at a time.

        how: engines sample what they were dealt; or take what waits (rollout.pulling); or, which the project does not
        do, are handed half of the rows by which the fullest engine has more than they, when nothing waits any more.
        """
        self.lengths, self.in_flight, self.clock, self.how = lengths, in_flight, clock, how
        self.engines = [_Engine() for _ in parts]
        self.rows = np.zeros(len(parts), dtype=np.int64)  # in flight
        store = dist.HashStore()
        self.claims = [Waiting(store, "step", parts, rank) for rank in range(len(parts))]
        if how == "dealt":
            for engine, part in zip(self.engines, parts, strict=True):
                engine.waiting.extend(part)
        self.sampled: list[list[Slot]] = [[] for _ in parts]  # who ended what
        self.foreseen: list[tuple[float, int, int]] = []

    def run(self) -> np.ndarray:
        """When each engine has nothing left to do [engines]."""
        # At the start all begin their own; then whoever's row ends next is next.
        for i in range(len(self.engines)):
            self._admit(i)
            self._foresee(i)
        while self.foreseen:
            now, i, number = heapq.heappop(self.foreseen)
            e = self.engines[i]
            if number != e.events:
                continue
            e.time, e.steps = now, e.ends[0][0]
            while e.ends and e.ends[0][0] == e.steps:
                self.sampled[i].append(heapq.heappop(e.ends)[1])
            self._admit(i)
            if self.how == "handed over" and len(e.ends) < self.in_flight:
                self._relieve(i)
            self._foresee(i)
        return np.array([e.time for e in self.engines])

    def _admit(self, i: int) -> None:
        """As an engine does: what waits here first, then what it has room for, at the start once."""
        e, before = self.engines[i], -1
        while before < len(e.ends) < self.in_flight and (before < 0 or e.steps):
            before = len(e.ends)
            if self.how != "dealt" and not e.waiting:
                e.waiting.extend(self.claims[i].claim(self.in_flight - before))
            while e.waiting and len(e.ends) < self.in_flight:
                slot = e.waiting.popleft()
                heapq.heappush(e.ends, (e.steps + int(self.lengths[slot]), slot))

    def _relieve(self, i: int) -> None:
        """Half of what the fullest engine has more, where that is a quarter and more: those with the fewest tokens."""
        j = int(self.rows.argmax())
        e, other = self.engines[i], self.engines[j]
        count = (len(other.ends) - len(e.ends)) // 2
        if j == i or other.waiting or count < 1 or 4 * (len(other.ends) - len(e.ends)) < len(other.ends):
            return

        # The other one stands where its clock is by now.
        step = self.clock.step(j, len(other.ends))
        done = int((e.time - other.time) / step)
        other.steps, other.time = other.steps + done, other.time + done * step
        so_far = sorted((int(self.lengths[slot]) - (end - other.steps), end, slot) for end, slot in other.ends)
        moved = so_far[:count]
        for tokens, end, slot in moved:
            heapq.heappush(e.ends, (e.steps + end - other.steps, slot))
            e.time += self.clock.prefill * tokens / self.clock.speed(i)
        other.ends = [(end, slot) for _, end, slot in so_far[count:]]
        heapq.heapify(other.ends)
        self._foresee(j)

    def _foresee(self, i: int) -> None:
        """The next end of a row."""
        e = self.engines[i]
        e.events, self.rows[i] = e.events + 1, len(e.ends)
        if e.ends:
            steps = max(e.ends[0][0] - e.steps, 0)
            heapq.heappush(self.foreseen, (e.time + steps * self.clock.step(i, len(e.ends)), i, e.events))
