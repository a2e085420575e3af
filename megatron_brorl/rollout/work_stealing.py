"""Work stealing between ranks: a rank whose engine has room samples rollouts that other ranks have not begun.

Each rank starts with its own part of a step's slots (rollout.sampler) and takes slots from the front of that part
whenever its engine has room. When its part is used up, it takes slots from the parts of other ranks. The ranks' store
holds one counter per part with the number of slots taken, so each slot is taken once. If an engine hangs, other ranks
take the rest of its part. The choice of the engine does not change a rollout, because its random numbers are keyed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from megatron_brorl.rollout.engine import Request
from megatron_brorl.rollout.sampler import Slot

_CALLS = count()  # of all instances in this process, which share the ranks' store


class Counters(Protocol):
    """Numbers that ranks share; a torch.distributed.Store is one."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number, which begins at 0, and return it."""

    def delete_key(self, key: str, /) -> bool:
        """Delete a number."""


class SharedSlots:
    """The slots of one call that no engine has begun; every rank has the same parts."""

    def __init__(self, counters: Counters, name: str, parts: Sequence[Sequence[Slot]], rank: int) -> None:
        """parts: the slots dealt to each rank. name: a name of the call that no other call has had."""
        self._counters, self._name, self._parts = counters, name, parts
        # Each rank searches the parts from its own on, so that ranks do not all take from the same one.
        self._order = [*range(rank, len(parts)), *range(rank)]
        self._total = sum(map(len, parts))
        self._left, self._first, self._rank = self._total > 0, True, rank

    def claim(self, room: int) -> list[Slot]:
        """Return at most `room` slots for the caller to sample, or an empty list if none are available now.

        The first claim returns only slots of this rank's own part, even if they do not fill `room`, because other ranks
        have hardly begun theirs.
        """
        if not self.left:
            return []
        if self._first:
            self._first = False
            return self._take(self._rank, room)

        # One counter tells whether anything is left, so that a finished rank need not ask for every part.
        self._left = self._counters.add(self._key("all"), 0) < self._total
        while self._left and self._order:
            found = self._take(self._order[0], room)
            if found:
                return found
            self._order.pop(0)  # Slots never come back to a part.
        return []

    @property
    def left(self) -> bool:
        """Return whether a later claim may find slots."""
        return self._left and (self._first or bool(self._order))

    def forget(self) -> None:
        """Delete this rank's counter, and on the first rank the one of all ranks, when all ranks have left the call."""
        self._left = False
        keys: list[int | str] = [self._rank] if self._rank else [0, "all"]
        for key in keys:
            self._counters.delete_key(self._key(key))

    def _take(self, rank: int, count: int) -> list[Slot]:
        """Return up to `count` slots of a rank that no other rank has taken, in order."""
        part = self._parts[rank]
        if not part:
            return []
        begin = self._counters.add(self._key(rank), count) - count
        found = list(part[begin : begin + count])
        if found:
            self._counters.add(self._key("all"), len(found))
        return found

    def _key(self, which: int | str) -> str:
        return f"slots/{self._name}/{which}"


@dataclass
class WorkStealing:
    """The shared slots of one call after another."""

    counters: Counters
    last: SharedSlots | None = None

    def begin(self, parts: Sequence[Sequence[Slot]], rank: int) -> SharedSlots | None:
        """Return the shared slots of a new call, or None if there is only one rank.

        All ranks must make the same sequence of calls, because the number of a call is part of its keys in the store.
        parts: the slots dealt to each rank, the same on all ranks.
        """
        if self.last:
            self.last.forget()
        self.last = SharedSlots(self.counters, str(next(_CALLS)), parts, rank) if len(parts) > 1 else None
        return self.last


@dataclass
class SlotSupply:
    """A rollout.engine.Supply of shared slots."""

    slots: SharedSlots
    make_requests: Callable[[Sequence[Slot]], list[Request]]  # called in the order in which slots are taken
    rows: int
    prompt_tokens: int

    def take(self, room: int) -> list[Request]:
        """See Supply."""
        slots = self.slots.claim(room) if room > 0 else []
        return self.make_requests(slots) if slots else []

    def wait(self) -> bool:
        """See Supply."""
        return self.slots.left
