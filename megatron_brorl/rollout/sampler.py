"""Distribution of a step's rollouts over the ranks, each of which has an engine.

The rollouts of every prompt are split over all ranks, because response length depends on the prompt. Random numbers do
not depend on the rank: they are keyed by (seed, round, prompt, sibling, position). A round can sample a prompt several
times. Each occurrence is a group with its own random stream. The replica that trains on a rollout is chosen when all
lengths are known (train.redistribute).

Work stealing (rollout.pull): a rank whose engine has room claims slots from the front of its own part of a step, and
then from the parts of other ranks. The torch.distributed store holds the number of claimed slots of each part, so each
slot is claimed once. If an engine hangs, other ranks sample the rest of its part.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, groupby

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_brorl.ops.philox import stream_key
from megatron_brorl.rollout.engine import Request
from megatron_brorl.types import Prompt, PromptGroup, Rollout

# Two independent rollouts whose log-probability is below -40 are equal with a probability below e^-40 = 4e-18, or 1e-12
# among all pairs of 512.
MIN_NATS = 40.0

Slot = tuple[int, int]  # a rollout to sample: (index of its group, sibling)
_CALL_NUMBERS = count()  # shared by all instances of WorkStealing in this process, because they share one store


def make_groups(prompts: Sequence[Prompt], round: int | str, start: int = 0) -> list[PromptGroup]:
    """Return one group per prompt of a sampling round, in order. A resumed run makes the same groups.

    start: index of the first prompt in the prompt source.
    """
    occurrences: Counter[str] = Counter()
    groups = []
    for index, prompt in enumerate(prompts):
        groups.append(PromptGroup(prompt, round, index, occurrences[prompt.id], start))
        occurrences[prompt.id] += 1
    return groups


def even_shares(total: int, loads: Sequence[int]) -> list[int]:
    """Return how many of `total` new rows each part gets.

    loads: rows that each part already has. New rows go to the parts with the fewest rows.
    """
    by_load = sorted(range(len(loads)), key=lambda i: loads[i])
    filled = len(loads)  # number of least loaded parts that can be filled to one level
    while total + sum(loads[i] for i in by_load[:filled]) < filled * loads[by_load[filled - 1]]:
        filled -= 1
    filled_parts = sorted(by_load[:filled])
    rows = total + sum(loads[i] for i in filled_parts)  # of these parts together
    shares = [0] * len(loads)
    for position, i in enumerate(filled_parts):
        shares[i] = rows * (position + 1) // filled - rows * position // filled - loads[i]
    return shares


def deal(slots: Sequence[Slot], loads: Sequence[int]) -> list[list[Slot]]:
    """Return the slots of each part: even_shares in total, and a proportional run of consecutive rollouts per group.

    slots: in (group, sibling) order.
    """
    parts: list[list[Slot]] = [[] for _ in loads]
    open_places = np.array(even_shares(len(slots), loads))
    for _, same in groupby(slots, key=lambda slot: slot[0]):
        siblings = list(same)

        # The remainder goes to the parts with the most places left.
        counts, remainders = np.divmod(open_places * len(siblings), open_places.sum())
        counts[np.argsort(-remainders, kind="stable")[: len(siblings) - counts.sum()]] += 1
        open_places -= counts

        # Consecutive rollouts of a prompt share its computation in an engine.
        begin = 0
        for part in counts.nonzero()[0].tolist():
            end = begin + int(counts[part])
            parts[part] += siblings[begin:end]
            begin = end
    return parts


def requests(
    slots: Sequence[Slot], groups: Sequence[PromptGroup], begun: Mapping[Slot, Rollout], seed: int
) -> tuple[list[Request], list[int]]:
    """Return one request per run of consecutive rollouts of a group, and the index of each request's group.

    The key of a request is a hash of (seed, round, prompt id). It includes the occurrence for all but a prompt's first
    group in a round. begun: "cut" rollouts among the slots, which continue from their tokens.
    """
    runs: list[list[Slot]] = []
    for group_index, sibling in slots:
        if runs and runs[-1][-1] == (group_index, sibling - 1):
            runs[-1].append((group_index, sibling))
        else:
            runs.append([(group_index, sibling)])
    requests = []
    for run in runs:
        group_index, first = run[0]
        group = groups[group_index]
        key = stream_key(seed, group.round, *([group.occurrence] if group.occurrence else []), group.prompt.id)
        continued = tuple(begun[slot] for slot in run if slot in begun)
        requests.append(Request(group.prompt, key, n=len(run), first=first, begun=continued))
    return requests, [run[0][0] for run in runs]


def improbable_rollouts(requests: Sequence[Request], rollouts: Sequence[Sequence[Rollout]]) -> tuple[Tensor, list[str]]:
    """Return hashes [K] int64 of (prompt, tokens) of rollouts too improbable to be sampled twice, and their names.

    rollouts: of each request. Equal hashes, on any ranks and in any groups of the prompt, mean that rollouts were
    sampled with the same random numbers.
    """
    hashes, names = [], []
    for request, siblings in zip(requests, rollouts, strict=True):
        for rollout in siblings:
            if float(rollout.log_probs.double().sum()) < -MIN_NATS:
                prompt_hash = hashlib.blake2b(request.prompt.id.encode(), digest_size=16).digest()
                digest = hashlib.blake2b(prompt_hash + rollout.token_ids.numpy().tobytes(), digest_size=8).digest()
                hashes.append(int.from_bytes(digest, "little", signed=True))
                names.append(f"prompt {request.prompt.id}: sibling {rollout.index}")
    return torch.tensor(hashes, dtype=torch.int64), names


@dataclass
class SharedSlots:
    """The unclaimed slots of one call. All ranks have the same parts."""

    counters: dist.Store
    name: str  # a name that no other call uses
    parts: Sequence[Sequence[Slot]]  # the slots of each rank
    rank: int

    def __post_init__(self) -> None:
        # Each rank starts at its own part, so that ranks do not all claim from the same part.
        self._order = [*range(self.rank, len(self.parts)), *range(self.rank)]

    def claim(self, room: int) -> list[Slot]:
        """Claim at most `room` slots, from this rank's own part first. Return [] if no slots are left."""
        while self._order:
            rank = self._order[0]
            begin = self.counters.add(self._key(rank), room) - room
            slots = list(self.parts[rank][begin : begin + room])
            if slots:
                return slots
            self._order.pop(0)  # Slots are never returned to a part.
        return []

    @property
    def left(self) -> bool:
        """Return whether a later claim may find slots."""
        return bool(self._order)

    def close(self) -> None:
        """Delete this rank's counter. All ranks must have finished the call."""
        self._order = []
        self.counters.delete_key(self._key(self.rank))

    def _key(self, rank: int) -> str:
        return f"slots/{self.name}/{rank}"


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
            self.last.close()
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
        slots = self.slots.claim(room) if room > 0 else []
        return self.make_requests(slots) if slots else []

    def has_more(self) -> bool:
        return self.slots.left
