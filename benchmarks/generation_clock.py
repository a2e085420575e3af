"""Generation of one step on engines with a clock of tokens: the project's dealing and pulling, in virtual time."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch.distributed as dist

from megatron_brorl.rollout.pulling import Waiting
from megatron_brorl.rollout.sampler import Slot


@dataclass(frozen=True)
class Clock:
    """How long an engine takes over one token of all its rows."""

    fixed: float  # that reading the weights takes, in rows
    speeds: Sequence[float] = ()  # of each engine; empty: all 1

    def step(self, engine: int, rows: int) -> float:
        """Time of a decoding step of so many rows; reading a row's keys and values takes 1."""
        return (self.fixed + rows) / (self.speeds[engine] if self.speeds else 1.0)


@dataclass
class _Engine:
    """Rows in flight by the step in which they end, and how many steps were done at what time."""

    waiting: deque[Slot] = field(default_factory=deque)  # that no other engine can take
    ends: list[tuple[int, Slot]] = field(default_factory=list)
    steps: int = 0
    time: float = 0.0


def generate(
    lengths: np.ndarray, parts: Sequence[Sequence[Slot]], in_flight: int, clock: Clock, pull: bool = True
) -> tuple[np.ndarray, list[list[Slot]]]:
    """When each engine has nothing left to do [engines], and what it sampled.

    lengths: tokens [groups, N]. parts: slots dealt to each engine. in_flight: rows that an engine has at a time.
    """
    store, engines = dist.HashStore(), [_Engine() for _ in parts]
    claims = [Waiting(store, "step", parts, rank) for rank in range(len(parts))]
    sampled: list[list[Slot]] = [[] for _ in parts]
    if not pull:
        for engine, part in zip(engines, parts, strict=True):
            engine.waiting.extend(part)

    def admit(i: int) -> None:
        # As an engine does: what waits here first, then what there is room for.
        e = engines[i]
        if pull and not e.waiting and len(e.ends) < in_flight:
            e.waiting.extend(claims[i].claim(in_flight - len(e.ends)))
        while e.waiting and len(e.ends) < in_flight:
            slot = e.waiting.popleft()
            sampled[i].append(slot)
            heapq.heappush(e.ends, (e.steps + int(lengths[slot]), slot))

    def next_end(i: int) -> float:
        e = engines[i]
        return e.time + (e.ends[0][0] - e.steps) * clock.step(i, len(e.ends))

    # Whoever's row ends next is next; at the start all begin their own.
    for i in range(len(engines)):
        admit(i)
    events = [(next_end(i), i) for i, e in enumerate(engines) if e.ends]
    heapq.heapify(events)
    while events:
        now, i = heapq.heappop(events)
        e = engines[i]
        e.time, e.steps = now, e.ends[0][0]
        while e.ends and e.ends[0][0] == e.steps:
            heapq.heappop(e.ends)
        while len(e.ends) < in_flight:
            before = len(e.ends)
            admit(i)
            if len(e.ends) == before:
                break
        if e.ends:
            heapq.heappush(events, (next_end(i), i))
    return np.array([e.time for e in engines]), sampled
