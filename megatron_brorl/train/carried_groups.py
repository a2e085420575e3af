"""Groups that a step carries over to the next one, and their part of a checkpoint.

A group stays together, finished rollouts included, until all of its rollouts are finished. A rollout stays on the rank
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
from megatron_brorl.rollout.sampler import deal, make_groups
from megatron_brorl.types import PromptGroup, Rollout, ScoredRollout

_FILES = "carried_*.safetensors"


@dataclass(frozen=True)
class CarriedGroups:
    """Groups that wait for the next step, the same on every rank, and this rank's rollouts of them in order.

    With rollout.partial_tokens they have partial rollouts: "cut" responses, which the next step continues. With
    rollout.refills they are surplus groups: complete ones beyond rollout.prompts, which the next step trains on.
    """

    groups: tuple[PromptGroup, ...] = ()
    rollouts: tuple[ScoredRollout, ...] = ()


def carry_over(
    groups: Sequence[PromptGroup], rollouts: Sequence[ScoredRollout], closed: Sequence[int]
) -> CarriedGroups:
    """Return the groups of a step that are not closed, with this rank's rollouts of them."""
    waiting = [g for g in range(len(groups)) if g not in set(closed)]
    new_index = {g: i for i, g in enumerate(waiting)}
    carried = [replace(with_own_tensors(r), group=new_index[r.group]) for r in rollouts if r.group in new_index]
    return CarriedGroups(tuple(groups[g] for g in waiting), tuple(carried))


def with_own_tensors(scored: ScoredRollout) -> ScoredRollout:
    """Copy the tensors of a rollout, because as views they would keep larger tensors in memory."""
    r = scored.rollout
    episode = r.episode and replace(r.episode, sampled=r.episode.sampled.clone())
    routes = None if r.routes is None else r.routes.clone()
    copy = replace(r, token_ids=r.token_ids.clone(), log_probs=r.log_probs.clone(), episode=episode, routes=routes)
    return replace(scored, rollout=copy)


def staleness(rollouts: Sequence[ScoredRollout], version: int) -> dict[str, float]:
    """Return the age of the tokens of all ranks: the optimizer steps from the weights that sampled them to `version`.

    The age is given as mean over the sampled tokens and as maximum. Collective.
    """
    ages = [(version - v, tokens) for r in rollouts for v, tokens in _sampled_spans(r.rollout)]
    sums = {"steps": float(sum(age * n for age, n in ages)), "tokens": float(sum(n for _, n in ages))}
    sums = collectives.all_reduce_sum(sums)
    oldest = collectives.all_reduce_max({"oldest": float(max((age for age, _ in ages), default=0))})["oldest"]
    return {"staleness_mean": sums["steps"] / (sums["tokens"] or 1.0), "staleness_max": oldest}


def _sampled_spans(rollout: Rollout) -> Sequence[tuple[int, int]]:
    """Return the spans of a rollout without the tokens of its environment."""
    if rollout.episode is None:
        return rollout.spans
    parts = rollout.episode.sampled.split([tokens for _, tokens in rollout.spans])
    return [(version, int(part.sum())) for (version, _), part in zip(rollout.spans, parts, strict=True) if part.any()]


def checkpoint_files(carried: CarriedGroups, grid: Grid) -> dict[str, bytes]:
    """Return this rank's files for a checkpoint, by name; none without groups.

    Prompts are not written, because the source returns them again.
    """
    if not carried.groups:
        return {}
    groups = torch.tensor([(g.round, g.index, g.start) for g in carried.groups])
    return {_FILES.replace("*", f"{grid.rank:05d}"): save({"groups": groups, **rollouts_to_tensors(carried.rollouts)})}


def read_checkpoint(directory: Path, source: PromptSource, grid: Grid) -> CarriedGroups:
    """Return the carried groups of a checkpoint. If the number of ranks has changed, their rollouts are dealt again.

    source: the prompt source of the run that wrote the checkpoint.
    """
    parts = [load_file(path) for path in sorted(directory.glob(_FILES))]
    if not parts:
        return CarriedGroups()
    groups = tuple(
        make_groups(source.prompts(start, index + 1), round_number, start)[index]
        for round_number, index, start in parts[0]["groups"].tolist()
    )
    if len(parts) == grid.world_size:
        return CarriedGroups(groups, tuple(rollouts_from_tensors(parts[grid.rank])))
    rollout_of_slot = {
        (r.group, r.rollout.index): r for r in sort_rollouts([r for part in parts for r in rollouts_from_tensors(part)])
    }
    own_slots = deal(list(rollout_of_slot), [0] * grid.world_size)[grid.rank]
    return CarriedGroups(groups, tuple(rollout_of_slot[slot] for slot in own_slots))
