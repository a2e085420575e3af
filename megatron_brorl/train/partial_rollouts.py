"""Partial rollouts: groups that are sampled over several steps, and what a checkpoint holds of them.

A group is carried whole, its finished siblings too, until none of them is "cut". Its rollouts stay on the rank that
began them. A token keeps the log-probability and the version of the weights that it was sampled with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from megatron_brorl.data.source import PromptSource
from megatron_brorl.parallel import collectives
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.rollout.engine import from_tensors, in_order, to_tensors
from megatron_brorl.rollout.sampler import Slot, deal, open_groups
from megatron_brorl.types import OpenGroup, Rollout, ScoredRollout

_FILES = "carried_*.safetensors"


@dataclass(frozen=True)
class Carried:
    """Groups that go on in the next step, the same on every rank, and this rank's rollouts of them in order."""

    groups: tuple[OpenGroup, ...] = ()
    rows: tuple[ScoredRollout, ...] = ()

    def begun(self) -> dict[Slot, Rollout]:
        """The rollouts that go on, by group and sibling."""
        return {(row.group, row.rollout.index): row.rollout for row in self.rows if row.rollout.finish == "cut"}

    def finished(self) -> list[ScoredRollout]:
        """The rows that only wait for their siblings."""
        return [row for row in self.rows if row.rollout.finish != "cut"]

    def loads(self) -> list[int]:
        """How many rollouts go on, per rank; a collective."""
        return collectives.all_gather(len(self.begun()))


def carry(groups: Sequence[OpenGroup], rows: Sequence[ScoredRollout], closed: Sequence[int]) -> Carried:
    """What goes on of a step's groups; rows: all of this rank's."""
    going_on = [g for g in range(len(groups)) if g not in set(closed)]
    place = {g: i for i, g in enumerate(going_on)}
    kept = []
    for row in rows:
        if row.group in place:
            r = row.rollout
            # Clones, so that a few rollouts do not keep the tensors of a whole step alive.
            rollout = replace(r, token_ids=r.token_ids.clone(), log_probs=r.log_probs.clone())
            kept.append(replace(row, group=place[row.group], rollout=rollout))
    return Carried(tuple(groups[g] for g in going_on), tuple(kept))


def staleness(rows: Sequence[ScoredRollout], version: int) -> dict[str, float]:
    """By how many optimizer steps the weights at `version` are ahead of those that sampled the tokens; a collective.

    The mean over tokens and the maximum, over this and the other ranks' rows.
    """
    behind = [(version - v, tokens) for row in rows for v, tokens in row.rollout.spans]
    sums = {"steps": float(sum(b * t for b, t in behind)), "tokens": float(sum(t for _, t in behind))}
    sums = collectives.all_reduce_sum(sums)
    most = collectives.all_reduce_max({"most": float(max((b for b, _ in behind), default=0))})["most"]
    return {"staleness_mean": sums["steps"] / (sums["tokens"] or 1.0), "staleness_max": most}


def files(carried: Carried, grid: Grid) -> dict[str, bytes]:
    """What this rank adds to a checkpoint, by name: its share. Without carried groups there is nothing to add.

    Prompts are not written: the source hands them out again.
    """
    if not carried.groups:
        return {}
    groups = torch.tensor([(g.step, g.index, g.start) for g in carried.groups])
    return {_FILES.replace("*", f"{grid.rank:05d}"): save({"groups": groups, **to_tensors(carried.rows)})}


def read(directory: Path, source: PromptSource, grid: Grid) -> Carried:
    """Return this rank's share of what was written, dealt again if the number of ranks has changed.

    source: that of the run that wrote it.
    """
    parts = [load_file(path) for path in sorted(directory.glob(_FILES))]
    if not parts:
        return Carried()
    places = parts[0]["groups"].tolist()
    groups = tuple(open_groups(source.prompts(start, place + 1), step, start)[place] for step, place, start in places)
    if len(parts) == grid.world:
        return Carried(groups, tuple(from_tensors(parts[grid.rank])))
    rows = in_order([row for part in parts for row in from_tensors(part)])
    found = {(row.group, row.rollout.index): row for row in rows}
    return Carried(groups, tuple(found[slot] for slot in deal(list(found), [0] * grid.world)[grid.rank]))
