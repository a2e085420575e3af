"""Rows that are half done are handed on once nothing waits any more, from engines that have many to those that run out.

An engine whose rows have come down to four fifths of the mean over all engines asks for as many as bring it to the
mean. One that has more than the mean stops some of its rows between two tokens and puts them, with their tokens and
log-probs, into a queue of the ranks' store. Whoever asked takes them from there, computes the keys and values of their
tokens anew, and goes on; random numbers are keyed by position, so that the tokens are those of any other engine.

A row is in one place at a time: with the engine that has it, or in the queue, from which it is taken in one operation.
What nobody takes is taken back by whoever runs out of rows next, which may be the one that gave it.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_brorl.rollout.engine import Held
from megatron_brorl.rollout.records import decoded, encoded
from megatron_brorl.rollout.sampler import Slot
from megatron_brorl.types import Rollout

INTERVAL_S = 0.25  # between two looks of an engine at what others have; of one that has no row, a fifth of it
HUNGRY = 0.8  # share of the mean rows of an engine at which it asks for more
MOST_HANDS = 3  # times that a row is handed on
AGAIN = 0.2  # at least so many tokens must still be possible, for each that has to be computed again: what that costs

_HEAD = struct.Struct("<IIII")  # group, sibling, tokens drawn in this call, times that it was handed on
_IDLE_LOOKS = 5


class Shared(Protocol):
    """Numbers and queues that ranks share; a torch.distributed.Store is one."""

    def add(self, key: str, amount: int, /) -> int:
        """The number after adding to it; it begins at 0."""

    def delete_key(self, key: str, /) -> bool:
        """Forget it."""

    def queue_push(self, key: str, value: bytes, /) -> None:
        """To the end of a queue."""

    def queue_pop(self, key: str, block: bool, /) -> bytes:
        """The first of a queue; raises QueueEmptyError where there is none."""

    def queue_len(self, key: str, /) -> int:
        """How many a queue has."""


@dataclass(frozen=True)
class HandedRow:
    """A row on its way: token_ids and log_probs of the rollout are [G]."""

    slot: Slot
    rollout: Rollout  # "cut"
    drawn: int  # tokens of it that were drawn in this call
    hands: int


class Handing:
    """One rank's view of the rows of a call: when it asks for some, and when and which it hands on."""

    def __init__(
        self,
        shared: Shared,
        name: str,
        total: int,
        world: int,
        max_tokens: int,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """name: of the call, which no other has had. total: rows of all `world` ranks. max_tokens: of a response."""
        self._shared, self._name, self._total, self._world = shared, name, total, world
        self._max_tokens, self._interval, self._clock = max_tokens, interval_s, clock
        self.handed_on, self.tokens_again = 0, 0  # rows that this rank gave, and tokens that it computed again
        self._reported = 0  # rows of this rank that have ended, as all know
        self._asked = 0  # rows that this rank has asked for and not got
        self._promised = 0  # rows that it has said it will give
        self._look_at = self._give_at = -math.inf  # not before

    def look_at(self, room: int, rows: int) -> float:
        """When an engine that has `rows`, and room for so many, looks the next time at what others have."""
        return min(self._look_at if room > 0 else math.inf, self._give_at if rows > 1 else math.inf)

    def over(self, ended: int) -> bool:
        """Whether no row of any rank is left; ended: rows that this rank's engine has had and has no more."""
        return self._left(ended) <= 0

    def take(self, room: int, rows: int, ended: int) -> list[HandedRow]:
        """Rows that others have handed on, `room` at most, for an engine that has `rows`."""
        # One that has nothing to do looks more often.
        now = self._clock()
        if room < 1 or now < self._look_at:
            return []
        self._look_at = now + (self._interval if rows else self._interval / _IDLE_LOOKS)

        # It asks before it is idle, for rows take a while to come.
        mean = self._left(ended) / self._world
        want = min(room, max(1, math.ceil(mean)) - rows) if rows <= HUNGRY * mean or not rows else 0
        if want != self._asked:
            self._shared.add(self._key("wanted"), want - self._asked)
            self._asked = want

        # Not only what it has asked for: whoever asked first may be gone.
        found: list[HandedRow] = []
        while len(found) < want and (row := self._pop()):
            found.append(row)
        self._asked -= len(found)
        self.tokens_again += sum(len(row.rollout.token_ids) for row in found)
        return found

    def excess(self, rows: int, ended: int, held: Callable[[], Sequence[Held]]) -> list[Held]:
        """What an engine that has `rows` should hand on; it says so by `give` before it asks again."""
        now = self._clock()
        if rows < 2 or now < self._give_at:
            return []
        self._give_at = now + self._interval

        # Only what others have asked for, and only what is more than everybody's share.
        surplus = rows - max(1, math.ceil(self._left(ended) / self._world))
        wanted = self._shared.add(self._key("wanted"), 0) if surplus > 0 else 0
        if wanted < 1:
            return []
        chosen = self._worth_it(held())[: min(surplus, wanted)]

        # Others may have promised the same ones meanwhile.
        over = -self._shared.add(self._key("wanted"), -len(chosen)) if chosen else 0
        if over > 0:
            self._shared.add(self._key("wanted"), min(over, len(chosen)))
            chosen = chosen[: max(0, len(chosen) - over)]
        self._promised = len(chosen)
        return chosen

    def give(self, rows: Sequence[HandedRow]) -> None:
        """Hand on what `excess` chose, or what of it has not ended meanwhile."""
        for row in rows:
            head = _HEAD.pack(*row.slot, row.drawn, row.hands)
            self._shared.queue_push(self._key("rows"), head + encoded(b"", row.rollout))
        self.handed_on += len(rows)
        if len(rows) < self._promised:
            self._shared.add(self._key("wanted"), self._promised - len(rows))
        self._promised = 0

    def leave(self) -> list[HandedRow]:
        """All that is on its way, for a caller that will go on with none of it."""
        found = []
        while row := self._pop():
            found.append(row)
        return found

    def forget(self, first: bool) -> None:
        """Delete what is left of the call; first: of the first rank. Nobody may ask any more."""
        if first:
            self.leave()
            for key in ("ended", "wanted"):
                self._shared.delete_key(self._key(key))

    def _worth_it(self, held: Sequence[Held]) -> list[Held]:
        """Those that may be handed on, first what costs least to compute again."""
        able = [
            row
            for row in held
            if row.hands < MOST_HANDS and (row.waits or self._max_tokens - row.tokens >= AGAIN * row.tokens)
        ]
        return sorted(able, key=lambda row: (not row.waits, row.tokens))

    def _left(self, ended: int) -> int:
        """Rows of all ranks that have not ended, as far as they have said."""
        new, self._reported = ended - self._reported, ended
        return self._total - self._shared.add(self._key("ended"), new)

    def _pop(self) -> HandedRow | None:
        key = self._key("rows")
        if not self._shared.queue_len(key):
            return None
        try:
            record = self._shared.queue_pop(key, False)
        except dist.QueueEmptyError:  # somebody was faster
            return None
        group, sibling, drawn, hands = _HEAD.unpack_from(record)
        rollout = decoded(record[_HEAD.size :], sibling)
        # Damaged on its way: it is sampled from its beginning.
        if rollout is None:
            nothing = torch.empty(0, dtype=torch.int64), torch.empty(0)
            return HandedRow((group, sibling), Rollout(sibling, *nothing, "cut"), 0, hands)
        return HandedRow((group, sibling), rollout, drawn, hands)

    def _key(self, which: str) -> str:
        return f"handing/{self._name}/{which}"
