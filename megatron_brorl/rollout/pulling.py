"""Rollouts that wait are taken by whichever engine has room, so that none is idle while another has a queue.

Slots are dealt (rollout.sampler), and each rank takes its own from the front as its engine has room. One that has taken
all of its own goes on with what other ranks have not begun: how much of a rank's slots is taken is a number in the
ranks' store, which whoever takes some adds to, so that each is taken once. An engine that hangs leaves to the others
what it has not begun. Who samples a rollout does not change it: its random numbers are keyed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_brorl.rollout.engine import Request
from megatron_brorl.rollout.sampler import Slot


class Counters(Protocol):
    """Numbers that ranks share; a torch.distributed.Store is one."""

    def add(self, key: str, amount: int, /) -> int:
        """The number after adding to it; it begins at 0."""

    def delete_key(self, key: str, /) -> bool:
        """Forget it."""


class Waiting:
    """The slots of one call of all ranks' engines that none has begun; every rank has the same parts."""

    def __init__(self, counters: Counters, name: str, parts: Sequence[Sequence[Slot]], rank: int) -> None:
        """parts: the slots dealt to each rank. name: of the call, which no other has had."""
        self._counters, self._name, self._parts = counters, name, parts
        # Ranks look for what is left from different places on, their own first.
        self._order = [*range(rank, len(parts)), *range(rank)]
        self._total = sum(map(len, parts))
        self._left, self._first, self._rank = self._total > 0, True, rank

    def claim(self, room: int) -> list[Slot]:
        """Slots that the caller samples from now on, `room` at most; empty: there is nothing for it now.

        The first time they are this rank's own, however few: others have hardly begun theirs. From then on they are
        whoever's, and each call means that rows have ended.
        """
        if not self._left:
            return []
        if self._first:
            self._first = False
            return self._take(self._rank, room)

        # Ask the one number that says whether there is anything before those of all ranks.
        self._left = self._counters.add(self._key("all"), 0) < self._total
        while self._left and self._order:
            found = self._take(self._order[0], room)
            if found:
                return found
            self._order.pop(0)  # for good: nothing comes back
        return []

    def forget(self) -> None:
        """Delete this rank's number; the first rank's call deletes that of all. Nobody may claim any more."""
        self._left = False
        keys: list[int | str] = [self._rank] if self._rank else [0, "all"]
        for key in keys:
            self._counters.delete_key(self._key(key))

    def _take(self, rank: int, count: int) -> list[Slot]:
        """Up to `count` of a rank's slots that nobody has taken, in order."""
        part = self._parts[rank]
        if not part:
            return []
        begin = self._counters.add(self._key(rank), count) - count
        found = list(part[begin : begin + count])
        if found:
            self._counters.add(self._key("all"), len(found))
        return found

    def _key(self, which: int | str) -> str:
        return f"waiting/{self._name}/{which}"


@dataclass
class Pulling:
    """Where a call's waiting slots are kept in common."""

    counters: Counters
    in_flight: int  # rows that an engine has at a time (config key rollout.max_num_seqs)
    calls: int = 0
    last: Waiting | None = None

    def waiting(self, parts: Sequence[Sequence[Slot]], loads: Sequence[int], rank: int) -> Waiting | None:
        """The slots of one call; None where every engine begins all of its own at once. All ranks call it alike.

        parts: what is dealt to each rank. loads: rows that each has besides.
        """
        # All have left the call before: its numbers are needed no more.
        if self.last:
            self.last.forget()
            self.last = None
        self.calls += 1
        if len(parts) > 1 and any(len(part) + load > self.in_flight for part, load in zip(parts, loads, strict=True)):
            self.last = Waiting(self.counters, str(self.calls), parts, rank)
        return self.last


@dataclass
class Pulled:
    """What is left of a call as requests: a rollout.engine.Supply."""

    waiting: Waiting
    asked: Callable[[list[Slot]], list[Request]]  # told of what is taken, in order
    rows: int
    prompt_tokens: int

    def take(self, room: int) -> list[Request]:
        """See Supply."""
        slots = self.waiting.claim(room)
        return self.asked(slots) if slots else []
