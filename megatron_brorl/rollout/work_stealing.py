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

import torch.distributed as dist

from megatron_brorl.rollout.engine import Request
from megatron_brorl.rollout.sampler import Slot

_CALLS = count()  # of all instances in this process, which share the ranks' store


class SharedSlots:
    """The slots of one call that no engine has begun; every rank has the same parts."""

    def __init__(self, counters: dist.Store, name: str, parts: Sequence[Sequence[Slot]], rank: int) -> None:
        """parts: the slots dealt to each rank. name: a name of the call that no other call has had."""
        self._counters = counters
        self._name = name
        self._parts = parts
        # Each rank searches the parts from its own on, so that ranks do not all take from the same one.
        self._order = [*range(rank, len(parts)), *range(rank)]
        self._rank = rank

    def claim(self, room: int) -> list[Slot]:
        """Return at most `room` slots for the caller to sample, or an empty list if none are available now.

        They are the next ones of this rank's own part, or of another part when that one is used up.
        """
        while self._order:
            rank = self._order[0]
            begin = self._counters.add(self._key(rank), room) - room
            found = list(self._parts[rank][begin : begin + room])
            if found:
                return found
            self._order.pop(0)  # Slots never come back to a part.
        return []

    @property
    def left(self) -> bool:
        """Return whether a later claim may find slots."""
        return bool(self._order)

    def forget(self) -> None:
        """Delete this rank's counter when all ranks have left the call."""
        self._order = []
        self._counters.delete_key(self._key(self._rank))

    def _key(self, rank: int) -> str:
        return f"slots/{self._name}/{rank}"


@dataclass
class WorkStealing:
    """The shared slots of one call after another."""

    counters: dist.Store
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

    def next_requests(self, room: int) -> list[Request]:
        """See Supply."""
        slots = self.slots.claim(room) if room > 0 else []
        return self.make_requests(slots) if slots else []

    def has_more(self) -> bool:
        """See Supply."""
        return self.slots.left
