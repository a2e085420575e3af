"""Who samples what: the rollouts of a step over the ranks, and back to the ranks that train on them.

A step's new rollouts, in (prompt, sibling) order, are cut into one run per data-parallel replica, and the work of a
replica into one run per rank of the tensor x context x pipeline group that holds its copy of the model. So the siblings
of a prompt may span ranks and replicas, and ranks differ by one rollout at most. Random numbers do not depend on the
cuts: they are keyed by (seed, step, prompt, sibling, position). A replica trains on what it sampled: its
ranks share their rows, and between replicas no rollout ever travels.

A step takes a prompt more than once where it spans epochs, or where there are fewer prompts than it takes. Each time is
a group of its own with a random stream of its own, which the occurrence names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch.distributed as dist
from torch import Tensor

from megatron_brorl.ops.philox import stream_key
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.rollout.engine import Request
from megatron_brorl.rollout.rows import from_tensors, to_tensors
from megatron_brorl.types import OpenGroup, Prompt, Rollout, ScoredRollout

Slot = tuple[int, int]  # a rollout to sample: (index of its open group, sibling)


def open_groups(prompts: Sequence[Prompt], step: int | str) -> list[OpenGroup]:
    """One group per prompt that a step takes up, in order; a pure function, so that a resumed run opens the same."""
    taken: Counter[str] = Counter()
    groups = []
    for place, prompt in enumerate(prompts):
        groups.append(OpenGroup(prompt, step, place, taken[prompt.id]))
        taken[prompt.id] += 1
    return groups


def even_cuts(total: int, loads: Sequence[int]) -> list[int]:
    """Where to cut `total` new rows into one run per part: part i gets rows cuts[i] to cuts[i + 1].

    loads: rows that each part has already. Parts end up with as even a number as new rows can make it: those that get
    any differ by one row at most, and no other has fewer.
    """
    by_load = sorted(range(len(loads)), key=lambda i: loads[i])
    filled = len(loads)  # so many of the least loaded parts can be brought to one level
    while total + sum(loads[i] for i in by_load[:filled]) < filled * loads[by_load[filled - 1]]:
        filled -= 1
    chosen = sorted(by_load[:filled])
    level = total + sum(loads[i] for i in chosen)  # times `filled`
    shares = [0] * len(loads)
    for place, i in enumerate(chosen):
        shares[i] = level * (place + 1) // filled - level * place // filled - loads[i]
    return [0, *accumulate(shares)]


def own_slots(begun: Sequence[Slot], new: Sequence[Slot], loads: Sequence[int], grid: Grid) -> list[Slot]:
    """What this rank samples: its share of its replica's work.

    begun: the replica's "cut" rollouts, which go on here; loads: how many there are on every replica. new: those that
    begin, of all replicas, in (group, sibling) order.
    """
    slots = [*begun, *new[slice(*even_cuts(len(new), loads)[grid.dp_rank : grid.dp_rank + 2])]]
    return slots[slice(*even_cuts(len(slots), [0] * grid.mp_size)[grid.mp_rank : grid.mp_rank + 2])]


def requests(
    slots: Sequence[Slot], groups: Sequence[OpenGroup], begun: Mapping[Slot, Rollout], seed: int
) -> tuple[list[Request], list[int]]:
    """One request per run of consecutive siblings, and the group of each.

    Keyed by (seed, step, prompt id), and by the occurrence too for all but a prompt's first group in a step.
    begun: "cut" rollouts among the slots, which go on from their tokens.
    """
    runs: list[list[Slot]] = []
    for group, sibling in slots:
        if runs and runs[-1][-1] == (group, sibling - 1):
            runs[-1].append((group, sibling))
        else:
            runs.append([(group, sibling)])
    asked = []
    for run in runs:
        group, first = run[0]
        g = groups[group]
        going_on = tuple(begun[slot] for slot in run if slot in begun)
        key = stream_key(seed, g.step, *([g.occurrence] if g.occurrence else []), g.prompt.id)
        asked.append(Request(g.prompt, key, len(run), first, going_on))
    return asked, [run[0][0] for run in runs]


def share_with_model_group(rows: list[ScoredRollout], grid: Grid) -> list[ScoredRollout]:
    """All rows of this replica, on every rank of it; a collective."""
    if grid.mp_size == 1:
        return rows
    shares: list[dict[str, Tensor]] = [{} for _ in range(grid.mp_size)]
    dist.all_gather_object(shares, to_tensors(rows), group=grid.replica)
    return [row for share in shares for row in from_tensors(share)]
