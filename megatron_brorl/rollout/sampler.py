"""Who samples what: the prompts of a step over the ranks, and back to the ranks that train on them.

Each data-parallel rank owns the prompts prompts[dp_rank::dp]. The tensor x pipeline ranks that together hold its copy
of the model split the sampling of those among themselves, and then share the token ids, since all of them train on the
same rows. Between data-parallel ranks no rollout ever travels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_brorl.ops.philox import stream_key
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.rollout.engine import Request
from megatron_brorl.types import Prompt, Rollout, RolloutGroup, ScoredGroup


def own_share(prompts: Sequence[Prompt], grid: Grid) -> list[Prompt]:
    """The prompts that this rank samples."""
    return list(prompts[grid.dp_rank :: grid.data][grid.mp_rank :: grid.mp_size])


def requests(prompts: Sequence[Prompt], n: int, seed: int, step: int | str) -> list[Request]:
    """n siblings for each prompt, keyed by (seed, step, prompt id): the same on whatever rank they are sampled."""
    return [Request(p, stream_key(seed, step, p.id), n) for p in prompts]


def share_with_model_group(groups: list[ScoredGroup], grid: Grid) -> list[ScoredGroup]:
    """Give every rank of the tensor x pipeline group all of its data-parallel rank's groups, in prompt order."""
    if grid.mp_size == 1:
        return groups
    shares: list[list[tuple]] = [[] for _ in range(grid.mp_size)]
    dist.all_gather_object(shares, [_flatten(g) for g in groups], group=grid.groups.mp)
    shared: list[ScoredGroup] = []
    for i in range(max(len(share) for share in shares)):
        shared.extend(_unflatten(share[i]) for share in shares if i < len(share))
    return shared


def _flatten(scored: ScoredGroup) -> tuple:
    """A handful of tensors instead of thousands of small ones: pickling costs per object."""
    rollouts = scored.group.rollouts
    return (
        scored.group.prompt,
        scored.group.version,
        torch.cat([r.token_ids for r in rollouts]),
        torch.cat([r.log_probs for r in rollouts]),
        [(r.index, len(r.token_ids), r.finish) for r in rollouts],
        scored.rewards,
    )


def _unflatten(flat: tuple) -> ScoredGroup:
    prompt, version, ids, log_probs, heads, rewards = flat
    lengths = [length for _, length, _ in heads]
    rollouts = tuple(
        Rollout(index, i, lp, finish)
        for (index, _, finish), i, lp in zip(heads, ids.split(lengths), log_probs.split(lengths), strict=True)
    )
    return ScoredGroup(RolloutGroup(prompt, rollouts, version), rewards)
