"""Generation of one step in virtual time by the code that deals slots to ranks; a clock counts decoding steps."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch.distributed as dist

from megatron_brorl.rollout.sampler import Slot
from megatron_brorl.rollout.work_stealing import SharedSlots

How = Literal["dealt", "pulled"]


@dataclass(frozen=True)
class Clock:
    """The time of a decoding step, in units of the time for the keys and values of one row."""

    fixed: float = 0.0  # per step, however many rows it has: reading the weights
    speeds: Sequence[float] = ()  # of each engine; empty: all 1

    def step(self, engine: int, rows: int) -> float:
        """Return the time of a decoding step of `rows` rows."""
        return (self.fixed + rows) / (self.speeds[engine] if self.speeds else 1.0)


@dataclass
class _Engine:
    """Rows in flight by the step in which they end, and how many steps were done at what time."""

    slots: SharedSlots
    ends: list[tuple[int, Slot]] = field(default_factory=list)
    steps: int = 0
    time: float = 0.0


class Step:
    """One step's generation."""

    def __init__(
        self, lengths: np.ndarray, parts: Sequence[Sequence[Slot]], in_flight: int, clock: Clock, how: How
    ) -> None:
        """lengths: tokens [groups, N]. parts: slots dealt to each engine. in_flight: rows of an engine at a time.

        how: engines sample what they were dealt, or take what waits (rollout.work_stealing).
        """
        self.lengths, self.in_flight, self.clock = lengths, in_flight, clock
        store = dist.HashStore()
        if how == "dealt":  # every rank has a queue of its own
            slots = [SharedSlots(dist.HashStore(), "step", [part], 0) for part in parts]
        else:
            slots = [SharedSlots(store, "step", parts, rank) for rank in range(len(parts))]
        self.engines = [_Engine(own) for own in slots]
        self.sampled: list[list[Slot]] = [[] for _ in parts]  # who ended what

    def run(self) -> tuple[np.ndarray, float]:
        """Return the time that each engine had work [engines], and when the last one was done."""
        # All begin their own at the start; then the engine whose row ends next is next.
        events: list[tuple[float, int]] = []
        for i in range(len(self.engines)):
            self._fill(i, events)
        while events:
            now, i = heapq.heappop(events)
            e = self.engines[i]
            e.time, e.steps = now, e.ends[0][0]
            while e.ends and e.ends[0][0] == e.steps:
                self.sampled[i].append(heapq.heappop(e.ends)[1])
            self._fill(i, events)
        times = np.array([e.time for e in self.engines])
        return times, float(times.max())

    def _fill(self, i: int, events: list[tuple[float, int]]) -> None:
        """Take rows as far as there is room, and note when the next one ends."""
        e = self.engines[i]
        while len(e.ends) < self.in_flight and (slots := e.slots.claim(self.in_flight - len(e.ends))):
            for slot in slots:
                heapq.heappush(e.ends, (e.steps + int(self.lengths[slot]), slot))
        if e.ends:
            steps = e.ends[0][0] - e.steps
            heapq.heappush(events, (e.time + steps * self.clock.step(i, len(e.ends)), i))
