"""Rows on their way from the ranks that sampled them to the replicas that train on them, each once.

Who has what, and who gets it, stands in tables that all ranks have, so that tokens and log-probabilities are all that
travels: 8 bytes per token to every rank of the replica. Verdicts are in the tables, and which weights drew a token
(Rollout.spans) is asked of nobody but its holder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_brorl.parallel import collectives
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.train.groups import FINISH, Outcomes
from megatron_brorl.types import Rollout, ScoredRollout

TOKEN_BYTES = 8  # an id and a log-probability, in 4 bytes each
MESSAGE_TOKENS = 2**25  # that a rank sends or receives at a time, about 256 MiB


@dataclass(frozen=True)
class Exchanged:
    rows: list[ScoredRollout]  # this replica's, in order, the same on all of its ranks
    moved: int  # bytes between ranks, of all of them; what stays on its rank is not counted


@dataclass(frozen=True)
class _Plan:
    """The rows that travel, in order; each field [K] int64."""

    group: Tensor
    sibling: Tensor
    source: Tensor  # rank
    target: Tensor  # replica
    tokens: Tensor

    def take(self, rows: Tensor | slice) -> _Plan:
        return _Plan(**{name: column[rows] for name, column in vars(self).items()})

    def slots(self) -> list[tuple[int, int]]:
        return list(zip(self.group.tolist(), self.sibling.tolist(), strict=True))


def exchange(rows: Sequence[ScoredRollout], outcomes: Outcomes, replica: Tensor, grid: Grid) -> Exchanged:
    """Bring every rollout to all ranks of its replica; a collective.

    rows: this rank's. outcomes: of all ranks' rows. replica: [groups, N], where each goes to; -1: nowhere.
    """
    group, sibling = (replica >= 0).nonzero(as_tuple=True)
    columns = (outcomes.holder, replica, outcomes.tokens)
    plan = _Plan(group, sibling, *(column[group, sibling] for column in columns))
    held = {(row.group, row.rollout.index): row.rollout for row in rows}

    # As many messages as keep each within bounds on every rank.
    sent = _sums(plan.source, plan.tokens, grid.world) * grid.mp_size
    received = _sums(plan.target, plan.tokens, grid.data)
    messages = -(-int(max(sent.max(), received.max())) // MESSAGE_TOKENS)
    found: dict[tuple[int, int], Rollout] = {}
    for i in range(messages):
        found |= _message(plan.take(slice(i, None, messages)), held, grid)

    brought = []
    for g, s in sorted(found):
        r, finish = found[g, s], FINISH[int(outcomes.state[g, s])]
        rollout = Rollout(s, r.token_ids, r.log_probs, finish)
        reward, right = float(outcomes.rewards[g, s]), bool(outcomes.right[g, s])
        brought.append(ScoredRollout(g, rollout, reward, right, int(outcomes.answers[g, s])))
    return Exchanged(brought, _bytes_moved(plan, grid))


def _message(plan: _Plan, held: Mapping[tuple[int, int], Rollout], grid: Grid) -> dict[tuple[int, int], Rollout]:
    """Those of these rows that this rank's replica gets, by group and sibling; a collective."""
    # To each rank of a replica the same: row by row its ids and its log-probabilities, bit for bit.
    own = plan.take(plan.source == grid.rank)
    for_replica: list[list[Tensor]] = [[torch.zeros(0, dtype=torch.int32)] for _ in range(grid.data)]
    for slot, target in zip(own.slots(), own.target.tolist(), strict=True):
        for_replica[target] += held[slot].token_ids.int(), held[slot].log_probs.view(torch.int32)
    parts = [torch.cat(pieces) for pieces in for_replica]
    replica_of = {rank: i for i, ranks in enumerate(grid.replicas) for rank in ranks}

    # Everybody knows what comes from whom, so that no sizes are exchanged.
    coming = plan.take(plan.target == grid.dp_rank)
    coming = coming.take(coming.source.argsort(stable=True))
    sizes = 2 * _sums(coming.source, coming.tokens, grid.world)
    received = collectives.all_to_all([parts[replica_of[rank]] for rank in range(grid.world)], sizes.tolist())

    # In the order in which they were sent: by rank, and by group and sibling.
    pieces = received.split(coming.tokens.repeat_interleave(2).tolist())
    rows = zip(coming.slots(), pieces[::2], pieces[1::2], strict=True)
    return {(g, s): Rollout(s, ids.long(), bits.view(torch.float32), "cut") for (g, s), ids, bits in rows}


def _sums(index: Tensor, values: Tensor, size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int64).index_add(0, index, values)


def _bytes_moved(plan: _Plan, grid: Grid) -> int:
    """Over all ranks: a row goes to every rank of its replica but the one that has it."""
    at_home = torch.zeros(grid.world, grid.data, dtype=torch.bool)
    for i, ranks in enumerate(grid.replicas):
        at_home[ranks, i] = True
    copies = grid.mp_size - at_home[plan.source, plan.target].long()
    return TOKEN_BYTES * int((plan.tokens * copies).sum())
