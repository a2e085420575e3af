"""Rollouts that wait are taken by whichever engine has room, so that none is idle while another has a queue.

Slots are dealt (rollout.sampler), and each rank takes its own from the front as its engine has room. One that has taken
all of its own goes on with what other ranks have not begun: how much of a rank's slots is taken is a number in the
ranks' store, which whoever takes some adds to, so that each is taken once. An engine that hangs leaves to the others
what it has not begun. When nothing waits any more, rows that are half done are handed on (rollout.handing). Who samples
a rollout does not change it: its random numbers are keyed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_brorl.errors import UserError
from megatron_brorl.rollout.engine import Held, Request
from megatron_brorl.rollout.handing import INTERVAL_S, HandedRow, Handing, Shared
from megatron_brorl.rollout.sampler import Slot
from megatron_brorl.types import Rollout

_MOMENT_S = 0.05  # that an engine without a row waits before it asks again


class Waiting:
    """The slots of one call of all ranks' engines that none has begun; every rank has the same parts."""

    def __init__(self, counters: Shared, name: str, parts: Sequence[Sequence[Slot]], rank: int) -> None:
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
        if not self.left:
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

    @property
    def left(self) -> bool:
        """Whether there may be something for this rank."""
        return self._left and (self._first or bool(self._order))

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
    """Where ranks keep in common what waits, and hand on what they have begun."""

    shared: Shared
    interval_s: float = INTERVAL_S  # see rollout.handing
    calls: int = 0
    last: tuple[Waiting, Handing] | None = None

    def __post_init__(self) -> None:
        if not hasattr(self.shared, "queue_push"):
            raise UserError("rollout.pull needs the queues of torch 2.8 and later: install it, or set it to false")

    def begin(
        self, parts: Sequence[Sequence[Slot]], loads: Sequence[int], rank: int, max_tokens: int
    ) -> tuple[Waiting, Handing] | None:
        """What ranks share in one call; None where there is one rank. All ranks call it alike.

        parts: the slots dealt to each rank. loads: rows that each has besides. max_tokens: of a response.
        """
        # All have left the call before: its numbers are needed no more.
        if self.last:
            waiting, handing = self.last
            waiting.forget()
            handing.forget(rank == 0)
            self.last = None
        self.calls += 1
        if len(parts) > 1:
            name, total = str(self.calls), sum(map(len, parts)) + sum(loads)
            handing = Handing(self.shared, name, total, len(parts), max_tokens, self.interval_s)
            self.last = Waiting(self.shared, name, parts, rank), handing
        return self.last


@dataclass
class Pulled:
    """What a rank's engine takes and gives in a call: a rollout.engine.Supply."""

    waiting: Waiting
    handing: Handing
    # What is asked for slots, some of which go on from tokens, and told of it, in order.
    asked: Callable[[Sequence[Slot], Mapping[Slot, Rollout]], list[Request]]
    requests: list[Request]  # that the engine has from the start
    groups: Sequence[int]  # of every request, those that are taken too
    rows: int
    prompt_tokens: int
    idle_s: float = 0.0  # seconds in which the engine had no row

    def __post_init__(self) -> None:
        self._had = sum(request.n for request in self.requests)  # rows that the engine had, and has not given
        self._idle_since: float | None = None

    def take(self, room: int, rows: int) -> list[Request]:
        """See Supply. Rows that are handed on come when nothing waits any more."""
        slots = self.waiting.claim(room) if room > 0 else []
        if slots or self.waiting.left:
            new = self.asked(slots, {}) if slots else []
        else:
            new = self._going_on(self.handing.take(room, rows, self._had - rows))
        self.requests += new
        self._had += sum(request.n for request in new)
        if new:
            self._end_idle()
        return new

    def excess(self, rows: int, held: Callable[[], Sequence[Held]]) -> list[Held]:
        """See Supply. Nobody asks for any before nothing waits."""
        return self.handing.excess(rows, self._had - rows, held)

    def give(self, rows: Sequence[tuple[int, Rollout]]) -> None:
        """See Supply."""
        given = []
        for number, rollout in rows:
            # What it had when this call of all ranks began is not of this call.
            request = self.requests[number]
            before = sum(len(r.token_ids) for r in request.begun if r.index == rollout.index) - request.drawn
            slot = self.groups[number], rollout.index
            given.append(HandedRow(slot, rollout, len(rollout.token_ids) - before, request.hands + 1))
        self.handing.give(given)
        self._had -= len(given)

    def wait(self) -> bool:
        """See Supply."""
        if self._idle_since is None:
            self._idle_since = time.monotonic()
        if self.over():
            self._end_idle()
            return False
        time.sleep(_MOMENT_S)
        return True

    def over(self) -> bool:
        """Whether nothing will come for an engine that has no row."""
        return not self.waiting.left and self.handing.over(self._had)

    def leave(self) -> list[Request]:
        """See Supply."""
        self._end_idle()
        new = self._going_on(self.handing.leave())
        self.requests += new
        return new

    def _end_idle(self) -> None:
        if self._idle_since is not None:
            self.idle_s += time.monotonic() - self._idle_since
        self._idle_since = None

    def _going_on(self, rows: Sequence[HandedRow]) -> list[Request]:
        """One request for each."""
        return [
            replace(request, drawn=row.drawn, hands=row.hands)
            for row in rows
            for request in self.asked([row.slot], {row.slot: row.rollout})
        ]
