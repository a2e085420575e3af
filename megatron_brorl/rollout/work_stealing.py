"""Work stealing: a rank whose engine has room samples rollouts that other ranks have not started.

Each rank first claims slots (rollout.sampler) from the front of its own part of a step, whenever its engine has room.
Then it claims slots from the parts of other ranks. The torch.distributed store holds the number of claimed slots of
each part, so each slot is claimed once. If an engine hangs, other ranks sample the rest of its part. With keyed random
numbers, rollouts do not depend on the rank that samples them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import torch.distributed as dist

from megatron_brorl.rollout.engine import Request
from megatron_brorl.rollout.sampler import Slot

_CALL_NUMBERS = count()  # shared by all instances of this process, because they share one store


class SharedSlots:
    """The unclaimed slots of one call. All ranks have the same parts."""

    def __init__(self, counters: dist.Store, name: str, parts: Sequence[Sequence[Slot]], rank: int) -> None:
        """parts: the slots of each rank. name: a name that no other call uses."""
        self._counters = counters
        self._name = name
        self._parts = parts
        # Each rank starts at its own part, so that ranks do not all claim from the same part.
        self._order = [*range(rank, len(parts)), *range(rank)]
        self._rank = rank

    def claim(self, room: int) -> list[Slot]:
        """Claim at most `room` slots, from this rank's own part first. Return [] if no slots are left."""
        while self._order:
            rank = self._order[0]
            begin = self._counters.add(self._key(rank), room) - room
            found = list(self._parts[rank][begin : begin + room])
            if found:
                return found
            self._order.pop(0)  # Slots are never returned to a part.
        return []

    @property
    def left(self) -> bool:
        """Return whether a later claim may find slots."""
        return bool(self._order)

    def delete_counter(self) -> None:
        """Delete this rank's counter. All ranks must have finished the call."""
        self._order = []
        self._counters.delete_key(self._key(self._rank))

    def _key(self, rank: int) -> str:
        return f"slots/{self._name}/{rank}"


@dataclass
class WorkStealing:
    """Creates the shared slots of successive calls."""

    counters: dist.Store
    last: SharedSlots | None = None

    def begin(self, parts: Sequence[Sequence[Slot]], rank: int) -> SharedSlots | None:
        """Return the shared slots of a new call, or None if there is only one rank.

        All ranks must make the same sequence of calls, because the call number is part of the keys in the store. parts:
        the slots of each rank, identical on all ranks.
        """
        if self.last:
            self.last.delete_counter()
        self.last = SharedSlots(self.counters, str(next(_CALL_NUMBERS)), parts, rank) if len(parts) > 1 else None
        return self.last


@dataclass
class SlotSupply:
    """A rollout.engine.Supply that claims shared slots."""

    slots: SharedSlots
    make_requests: Callable[[Sequence[Slot]], list[Request]]  # called in the order of claims
    rows: int
    prompt_tokens: int

    def next_requests(self, room: int) -> list[Request]:
        """See Supply."""
        slots = self.slots.claim(room) if room > 0 else []
        return self.make_requests(slots) if slots else []

    def has_more(self) -> bool:
        """See Supply."""
        return self.slots.left
