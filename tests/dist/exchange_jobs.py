"""Rollouts are dealt, assigned to replicas and exchanged without a model; each rank returns its rows and messages."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from dist.jobs import grid_of

from megatron_brorl.config.schema import AlgoConfig
from megatron_brorl.parallel.balance import CostModel
from megatron_brorl.rollout.sampler import deal
from megatron_brorl.train import redistribute
from megatron_brorl.train.groups import choose_subset, gather_outcomes, select_groups
from megatron_brorl.types import Episode, Rollout, ScoredRollout

GROUPS = 6
N = 90
PROMPTS = [5, 300, 20, 40, 8, 150]  # tokens
LOST = {(0, 3), (2, 89), (5, 44)}
CUT = {(4, 17)}  # so that group 4 is not closed


def rollout(group: int, sibling: int) -> ScoredRollout:
    """Make a rollout from its position; some log-probabilities are not finite, and some tokens not sampled."""
    g = torch.Generator().manual_seed(1000 * group + sibling)
    tokens = int((200 * (0.5 * torch.randn(2, generator=g).sum()).exp()).clamp(1, 900))
    log_probs = torch.randn(tokens, generator=g)
    log_probs[-1] = (float("nan"), float("-inf"), -0.0)[sibling % 3]
    finish = "cut" if (group, sibling) in CUT else ("stop", "length")[tokens > 700]
    # All of group 3 are right, so that it is not kept.
    reward = 1.0 if group == 3 else float(sibling % 4 == 0)
    ids = torch.randint(0, 2**30, (tokens,), generator=g)
    routes = torch.randint(0, 300, (PROMPTS[group] + tokens - 1, 3, 1), generator=g, dtype=torch.int16)
    episode = Episode(torch.arange(tokens) % 5 > 0, 3) if sibling % 3 else None
    rollout = Rollout(sibling, ids, log_probs, finish, ((0, tokens),), episode, routes)
    return ScoredRollout(group, rollout, reward, finish != "cut" and sibling % 3 == 0, sibling + 2**40)


def exchanged(
    rank: int, parallel: dict[str, Any], algo: AlgoConfig, costs: CostModel, message: int, with_routes: bool
) -> dict[str, Any]:
    """Return this rank's rows, its log, and the bytes of its messages to other ranks."""
    grid = grid_of(**parallel)
    slots = list(product(range(GROUPS), range(N)))
    own = [rollout(*slot) for slot in deal(slots, [0] * grid.world_size)[rank] if slot not in LOST]
    outcomes = select_groups(gather_outcomes(own, GROUPS, N))
    subset = choose_subset(outcomes, algo)
    replica, balance = redistribute.assign_replicas(outcomes, subset, PROMPTS, algo, costs, grid.dp_size)

    sent = []
    send = dist.all_to_all_single

    def spy(received: torch.Tensor, flat: torch.Tensor, sizes: list[int], splits: list[int]) -> Any:
        assert sum(splits) == len(flat)
        sent.append(flat.element_size() * (sum(splits) - splits[rank]))
        return send(received, flat, sizes, splits)

    with mock.patch.object(dist, "all_to_all_single", spy), mock.patch.object(redistribute, "MESSAGE_BYTES", message):
        no_routes = torch.empty(0, 3, 1, dtype=torch.int16) if with_routes else None
        rows, moved = redistribute.send_to_replicas(own, outcomes, replica, grid, PROMPTS, no_routes)
    return {
        "replica": grid.dp_rank,
        "rows": [replace(row, log_probs=row.log_probs.view(torch.int32)) for row in rows],
        "held": [(row.group, row.rollout.index) for row in own],
        "moved": moved,
        "balance": balance,
        "sent": sum(sent),
        "messages": len(sent),
    }


def nothing(_rank: int, parallel: dict[str, Any], algo: AlgoConfig, costs: CostModel) -> tuple[list[Any], int, float]:
    """Return rows, bytes and balance of a step whose groups were all lost."""
    grid = grid_of(**parallel)
    outcomes = select_groups(gather_outcomes([], GROUPS, N))
    subset = choose_subset(outcomes, algo)
    replica, balance = redistribute.assign_replicas(outcomes, subset, PROMPTS, algo, costs, grid.dp_size)
    rows, moved = redistribute.send_to_replicas([], outcomes, replica, grid)
    return rows, moved, balance
