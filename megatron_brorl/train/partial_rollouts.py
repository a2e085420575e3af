"""Partial rollouts: groups that are sampled over several steps, and their part of a checkpoint.

A group stays together, finished rollouts included, until none of its rollouts is "cut". A rollout stays on the rank
that began it. Each token keeps the log-probability and the weight version that it was sampled with.
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
from megatron_brorl.rollout.engine import rollouts_from_tensors, rollouts_to_tensors, sort_rollouts
from megatron_brorl.rollout.sampler import Slot, deal, open_groups
from megatron_brorl.types import OpenGroup, Rollout, ScoredRollout

_FILES = "carried_*.safetensors"


@dataclass(frozen=True)
class PartialRollouts:
    """Groups that continue in the next step, the same on every rank, and this rank's rollouts of them in order."""

    groups: tuple[OpenGroup, ...] = ()
    rollouts: tuple[ScoredRollout, ...] = ()

    def cut_rollouts(self) -> dict[Slot, Rollout]:
        """Return the rollouts that continue, by group and rollout index."""
        return {(r.group, r.rollout.index): r.rollout for r in self.rollouts if r.rollout.finish == "cut"}

    def finished_rollouts(self) -> list[ScoredRollout]:
        """Return the rollouts that wait for others of their group."""
        return [r for r in self.rollouts if r.rollout.finish != "cut"]

    def counts_per_rank(self) -> list[int]:
        """Return the number of rollouts that continue on each rank. Collective."""
        return collectives.all_gather(len(self.cut_rollouts()))


def keep_open_groups(
    groups: Sequence[OpenGroup], rollouts: Sequence[ScoredRollout], closed: Sequence[int]
) -> PartialRollouts:
    """Return the groups of a step that are not closed, with this rank's rollouts of them."""
    still_open = [g for g in range(len(groups)) if g not in set(closed)]
    new_index = {g: i for i, g in enumerate(still_open)}
    kept = [replace(copied(r), group=new_index[r.group]) for r in rollouts if r.group in new_index]
    return PartialRollouts(tuple(groups[g] for g in still_open), tuple(kept))


def copied(scored: ScoredRollout) -> ScoredRollout:
    """Return the rollout with copies of its tensors, which otherwise are views that keep a whole step's memory."""
    r = scored.rollout
    return replace(scored, rollout=replace(r, token_ids=r.token_ids.clone(), log_probs=r.log_probs.clone()))


def staleness(rollouts: Sequence[ScoredRollout], version: int) -> dict[str, float]:
    """Return the optimizer steps between the weights that sampled a token and those at `version`. Collective.

    The mean over tokens and the maximum, over the rollouts of all ranks.
    """
    behind = [(version - v, tokens) for r in rollouts for v, tokens in r.rollout.spans]
    sums = {"steps": float(sum(b * t for b, t in behind)), "tokens": float(sum(t for _, t in behind))}
    sums = collectives.all_reduce_sum(sums)
    most = collectives.all_reduce_max({"most": float(max((b for b, _ in behind), default=0))})["most"]
    return {"staleness_mean": sums["steps"] / (sums["tokens"] or 1.0), "staleness_max": most}


def checkpoint_files(partial: PartialRollouts, grid: Grid) -> dict[str, bytes]:
    """Return this rank's files for a checkpoint, by name; none if no group continues.

    Prompts are not written, because the source returns them again.
    """
    if not partial.groups:
        return {}
    groups = torch.tensor([(g.step, g.index, g.start) for g in partial.groups])
    return {_FILES.replace("*", f"{grid.rank:05d}"): save({"groups": groups, **rollouts_to_tensors(partial.rollouts)})}


def read_checkpoint(directory: Path, source: PromptSource, grid: Grid) -> PartialRollouts:
    """Return this rank's share of the checkpoint's partial rollouts, dealt again if the number of ranks has changed.

    source: the source of the run that wrote them.
    """
    parts = [load_file(path) for path in sorted(directory.glob(_FILES))]
    if not parts:
        return PartialRollouts()
    places = parts[0]["groups"].tolist()
    groups = tuple(open_groups(source.prompts(start, index + 1), step, start)[index] for step, index, start in places)
    if len(parts) == grid.world_size:
        return PartialRollouts(groups, tuple(rollouts_from_tensors(parts[grid.rank])))
    found = {
        (r.group, r.rollout.index): r for r in sort_rollouts([r for part in parts for r in rollouts_from_tensors(part)])
    }
    own_slots = deal(list(found), [0] * grid.world_size)[grid.rank]
    return PartialRollouts(groups, tuple(found[slot] for slot in own_slots))
