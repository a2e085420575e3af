"""Exchange of rows on 2 and 4 ranks without a model: bit-exact, at equal cost, and without unnecessary bytes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dist.jobs import grid_of
from dist.world import PP, TP

from megatron_brorl.config.schema import AlgoConfig
from megatron_brorl.parallel.balance import CostModel
from megatron_brorl.rollout.sampler import deal
from megatron_brorl.train import redistribute
from megatron_brorl.train.groups import STOP, Outcomes, choose_subset, gather_outcomes, select_groups
from megatron_brorl.types import Episode, Rollout, ScoredRollout

GROUPS = 6
N = 90
PROMPT_TOKENS = [5, 300, 20, 40, 8, 150]
LOST = {(0, 3), (2, 89), (5, 44)}
CUT = {(4, 17)}  # so that group 4 is not closed
KEPT = [0, 1, 2, 5]  # all rollouts of group 3 are right, and one of group 4 continues in the next step
PAIR = 1e-3  # CostModel.pair


@cache
def rollout(group: int, sibling: int) -> ScoredRollout:
    """Make a rollout from its position; some log-probabilities are not finite, and some tokens not sampled."""
    g = torch.Generator().manual_seed(1000 * group + sibling)
    tokens = int((200 * (0.5 * torch.randn(2, generator=g).sum()).exp()).clamp(1, 900))
    log_probs = torch.randn(tokens, generator=g)
    log_probs[-1] = (float("nan"), float("-inf"), -0.0)[sibling % 3]
    finish = "cut" if (group, sibling) in CUT else ("stop", "length")[tokens > 700]
    reward = 1.0 if group == 3 else float(sibling % 4 == 0)
    ids = torch.randint(0, 2**30, (tokens,), generator=g)
    routes = torch.randint(0, 300, (PROMPT_TOKENS[group] + tokens - 1, 3, 1), generator=g, dtype=torch.int16)
    episode = Episode(torch.arange(tokens) % 5 > 0, turns=3) if sibling % 3 else None
    sampled = Rollout(sibling, ids, log_probs, finish, spans=((0, tokens),), episode=episode, routes=routes)
    right = finish != "cut" and sibling % 3 == 0
    return ScoredRollout(group, sampled, reward, right, answer=sibling + 2**40)


def exchanged(
    rank: int, parallel: dict[str, Any], algo: AlgoConfig, costs: CostModel, message: int, with_routes: bool
) -> dict[str, Any]:
    """Return this rank's rows, the rollouts that it sampled, metrics, and the bytes sent. message: MESSAGE_BYTES."""
    grid = grid_of(**parallel)
    slots = list(product(range(GROUPS), range(N)))
    own_rollouts = [rollout(*slot) for slot in deal(slots, [0] * grid.world_size)[rank] if slot not in LOST]
    outcomes = select_groups(gather_outcomes(own_rollouts, GROUPS, N))
    subset = choose_subset(outcomes, algo)
    replica, balance = redistribute.assign_replicas(outcomes, subset, PROMPT_TOKENS, algo, costs, grid.dp_size)

    sent = []
    send = dist.all_to_all_single

    def spy(received: torch.Tensor, flat: torch.Tensor, sizes: list[int], splits: list[int]) -> Any:
        assert sum(splits) == len(flat)
        sent.append(flat.element_size() * (sum(splits) - splits[rank]))
        return send(received, flat, sizes, splits)

    with mock.patch.object(dist, "all_to_all_single", spy), mock.patch.object(redistribute, "MESSAGE_BYTES", message):
        no_routes = torch.empty(0, 3, 1, dtype=torch.int16) if with_routes else None
        rows, moved = redistribute.send_to_replicas(own_rollouts, outcomes, replica, grid, PROMPT_TOKENS, no_routes)
    return {
        "replica": grid.dp_rank,
        "rows": [replace(row, log_probs=row.log_probs.view(torch.int32)) for row in rows],
        "sampled": [(row.group, row.rollout.index) for row in own_rollouts],
        "moved": moved,
        "balance": balance,
        "sent": sum(sent),
        "messages": len(sent),
    }


def cost(rows: list[tuple[int, int]]) -> float:
    """Return the cost of a row with its own prompt: its tokens, and PAIR for each pair of tokens."""
    lengths = [PROMPT_TOKENS[g] + len(rollout(g, s).rollout.token_ids) for g, s in rows]
    return sum(n + PAIR * sum(range(n)) for n in lengths)


@pytest.mark.parametrize(
    ("size", "parallel", "mini_batch_of", "overlong", "message_bytes"),
    [
        (2, {}, "prompts", False, 2**28),
        (2, TP, "siblings", True, 80_000),
        (4, PP, "prompts", False, 2**28),
        (4, {}, "siblings", True, 80_000),
    ],
)
def test_rows_reach_their_replicas(worlds, size, parallel, mini_batch_of, overlong, message_bytes):
    with_routes = overlong
    algo = AlgoConfig(mini_batches=3, mini_batch_of=mini_batch_of, overlong_filter=overlong)
    cost_model = CostModel(PAIR, limit=4096, share=False)
    ranks = worlds(size).run("test_exchange:exchanged", parallel, algo, cost_model, message_bytes, with_routes)
    ranks_per_replica = prod(parallel.values())
    replicas = {rank["replica"]: rank["rows"] for rank in ranks}
    assert sorted(replicas) == list(range(size // ranks_per_replica))

    # All ranks of a replica have the same rows; every trained row is on one replica, unchanged.
    replica_of = {}
    for rank in ranks:
        for a, b in zip(rank["rows"], replicas[rank["replica"]], strict=True):
            assert (a.group, a.index) == (b.group, b.index)
        for row in rank["rows"]:
            original = rollout(row.group, row.index)
            assert torch.equal(row.token_ids, original.rollout.token_ids)
            assert torch.equal(row.log_probs, original.rollout.log_probs.view(torch.int32))
            masks = [row.sampled, getattr(original.rollout.episode, "sampled", None)]
            assert masks == [None, None] or torch.equal(*masks)
            assert row.right == original.right
            if with_routes:
                assert torch.equal(row.routes, original.rollout.routes)
            else:
                assert row.routes is None
            replica_of[row.group, row.index] = rank["replica"]
    expected = {slot for slot in product(KEPT, range(N)) if slot not in LOST | CUT}
    if overlong:
        expected = {slot for slot in expected if rollout(*slot).rollout.finish == "stop"}
    assert replica_of.keys() == expected
    assert sum(map(len, replicas.values())) == len(expected)

    # In every optimizer step all replicas have equal costs.
    mean = 0.0
    largest = 0.0
    for step in range(3):
        batch = [(g, s) for g, s in replica_of if (KEPT.index(g) if mini_batch_of == "prompts" else s) % 3 == step]
        costs = [cost([slot for slot in batch if replica_of[slot] == replica]) for replica in replicas]
        assert min(costs) > 0
        assert max(costs) <= 1.02 * sum(costs) / len(costs)
        mean = mean + sum(costs) / len(costs)
        largest = largest + max(costs)
    assert all(rank["balance"] == pytest.approx(mean / largest, abs=1e-3) for rank in ranks)

    # A row is sent once to every rank of its replica that did not sample it, 4 bytes per id and per log-probability,
    # and 2 for each of the 3 experts of a token.
    sampled_on = {slot: rank["replica"] for rank in ranks for slot in rank["sampled"]}
    needed = 0
    for slot, replica in replica_of.items():
        row = rollout(*slot).rollout
        receivers = ranks_per_replica - (sampled_on[slot] == replica)
        needed += receivers * (8 * len(row.token_ids) + 6 * with_routes * len(row.routes))
    assert {rank["moved"] for rank in ranks} == {needed}
    assert sum(rank["sent"] for rank in ranks) == needed
    assert all(rank["messages"] > (2 if message_bytes < 2**28 else 0) for rank in ranks)  # the small limit splits them


def nothing(_rank: int, parallel: dict[str, Any], algo: AlgoConfig, costs: CostModel) -> tuple[list[Any], int, float]:
    """Return rows, bytes and balance of a step whose groups were all lost."""
    grid = grid_of(**parallel)
    outcomes = select_groups(gather_outcomes([], GROUPS, N))
    subset = choose_subset(outcomes, algo)
    replica, balance = redistribute.assign_replicas(outcomes, subset, PROMPT_TOKENS, algo, costs, grid.dp_size)
    rows, moved = redistribute.send_to_replicas([], outcomes, replica, grid)
    return rows, moved, balance


def test_exchange_without_rows_to_train_on(worlds):
    """If every rollout is lost, all ranks agree that there are no messages."""
    algo = AlgoConfig(mini_batches=2)
    for result in worlds(2).run("test_exchange:nothing", {}, algo, CostModel(PAIR, limit=4096, share=True)):
        assert result == ([], 0, 1.0)


def test_the_balance_of_two_optimizer_steps():
    """Rows of 110, 20 and 20 tokens, then three of 50, on two replicas: (75 + 75) / (110 + 100)."""
    tokens = torch.tensor([[100, 10, 10], [40, 40, 40]])
    zeros = torch.zeros_like(tokens)
    state = torch.full_like(tokens, STOP)
    tables = {"tokens": tokens, "sampled": tokens, "repeats": zeros, "answers": zeros, "holder": zeros}
    outcomes = Outcomes(state, rewards=zeros.float(), right=zeros.bool(), **tables, closed=[0, 1], kept=[0, 1])
    algo = AlgoConfig(mini_batches=2)
    subset = choose_subset(outcomes, algo)
    costs = CostModel(pair=0.0, limit=1024, share=False)
    _, balance = redistribute.assign_replicas(outcomes, subset, [10, 10], algo, costs, replicas=2)
    assert balance == pytest.approx(150 / 210)
