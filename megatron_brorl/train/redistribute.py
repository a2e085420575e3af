"""Send each rollout from the rank that sampled it to the replica that trains on it.

Replicas wait for each other at every optimizer step, so the rollouts of each optimizer step are balanced separately, by
their predicted cost. All ranks know all lengths and compute the same assignment.

Only tokens and log-probabilities travel, 8 bytes per token to every rank of the replica. Rewards and lengths are in
tables that all ranks have. A token of an environment travels as the bitwise complement of its id, which is negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_brorl.config.schema import AlgoConfig
from megatron_brorl.parallel import collectives
from megatron_brorl.parallel.balance import CostModel, assign, loads_of, pair_cost
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.train.groups import FINISH, Outcomes, mini_batch_of, trained_mask
from megatron_brorl.train.worker import Worker
from megatron_brorl.types import Episode, Rollout, ScoredRollout

TOKEN_BYTES = 8  # an id and a log-probability, 4 bytes each
MESSAGE_TOKENS = 2**25  # tokens that a rank sends or receives per message, about 256 MiB


def cost_model(worker: Worker) -> CostModel:
    """Return the cost of training this actor on a rollout."""
    options = worker.options
    limit = options.tokens_per_micro_batch * worker.grid.cp_size
    return CostModel(pair_cost(worker.shape), limit, options.share_prompt)


def assign_replicas(
    outcomes: Outcomes, prompt_tokens: Sequence[int], algo: AlgoConfig, costs: CostModel, replicas: int
) -> tuple[Tensor, float]:
    """Return the replica that trains on each rollout, int64 [groups, N] with -1 for none, and the balance.

    The balance is the mean over replicas of the predicted cost divided by its maximum, summed over optimizer steps; 1
    without rollouts. prompt_tokens: of each group. The result is the same on every rank.
    """
    replica = torch.full_like(outcomes.state, -1)
    group, sibling = trained_mask(outcomes, algo.overlong_filter).nonzero(as_tuple=True)
    prompts = torch.tensor(prompt_tokens, dtype=torch.int64)[group]
    responses = outcomes.tokens[group, sibling]

    kept_index = torch.zeros(len(outcomes.state), dtype=torch.int64)
    kept_index[outcomes.kept] = torch.arange(len(outcomes.kept))
    mini_batch = mini_batch_of(kept_index[group], sibling, algo.mini_batches, algo.mini_batch_of)

    mean = 0.0
    most = 0
    for i in range(algo.mini_batches):
        rows = (mini_batch == i).nonzero()[:, 0]
        groups = group[rows].numpy()
        # A replica computes a shared prompt once for all of its rollouts of a group.
        own_costs, prompt_costs = costs.rows(prompts[rows].numpy(), responses[rows].numpy(), groups)
        assigned = assign(own_costs, replicas, groups, prompt_costs)
        replica[group[rows], sibling[rows]] = torch.from_numpy(assigned)

        loads = loads_of(replicas, assigned, own_costs, groups, prompt_costs)
        mean += float(loads.mean())
        most += int(loads.max())
    return replica, mean / most if most else 1.0


@dataclass(frozen=True)
class _Transfers:
    """The rollouts to send, in (group, sibling) order; each field [K] int64."""

    group: Tensor
    sibling: Tensor
    source: Tensor  # rank
    target: Tensor  # replica
    tokens: Tensor

    def select(self, rows: Tensor | slice) -> _Transfers:
        return _Transfers(**{name: column[rows] for name, column in vars(self).items()})

    def slots(self) -> list[tuple[int, int]]:
        return list(zip(self.group.tolist(), self.sibling.tolist(), strict=True))


def send_to_replicas(
    rollouts: Sequence[ScoredRollout], outcomes: Outcomes, replica: Tensor, grid: Grid
) -> tuple[list[ScoredRollout], int]:
    """Send every rollout to all ranks of its replica. Collective.

    Returns the rollouts of this replica in order, the same on all of its ranks, and the bytes sent between all ranks.
    rollouts: of this rank. outcomes: of all ranks. replica: int64 [groups, N] from assign_replicas.
    """
    group, sibling = (replica >= 0).nonzero(as_tuple=True)
    columns = (outcomes.holder, replica, outcomes.tokens)
    transfers = _Transfers(group, sibling, *(column[group, sibling] for column in columns))
    held = {(r.group, r.rollout.index): r.rollout for r in rollouts}

    # Use as many messages as MESSAGE_TOKENS requires on the busiest rank.
    sent = _sums(transfers.source, transfers.tokens, grid.world_size) * grid.mp_size
    received = _sums(transfers.target, transfers.tokens, grid.dp_size)
    messages = -(-int(max(sent.max(), received.max())) // MESSAGE_TOKENS)
    found: dict[tuple[int, int], Rollout] = {}
    for i in range(messages):
        found |= _exchange(transfers.select(slice(i, None, messages)), held, grid)

    result = []
    with_environment = outcomes.sampled < outcomes.tokens
    for g, s in sorted(found):
        rollout = Rollout(s, found[g, s].token_ids, found[g, s].log_probs, FINISH[int(outcomes.state[g, s])])
        if with_environment[g, s]:
            sampled = rollout.token_ids >= 0
            ids = torch.where(sampled, rollout.token_ids, ~rollout.token_ids)
            rollout = replace(rollout, token_ids=ids, episode=Episode(sampled, turns=0))
        reward = float(outcomes.rewards[g, s])
        right = bool(outcomes.right[g, s])
        result.append(ScoredRollout(g, rollout, reward, right, int(outcomes.answers[g, s])))
    return result, _bytes_sent(transfers, grid)


def _exchange(
    transfers: _Transfers, held: Mapping[tuple[int, int], Rollout], grid: Grid
) -> dict[tuple[int, int], Rollout]:
    """Send the rollouts, and return those that this rank's replica receives, by group and rollout index. Collective."""
    # All ranks of a replica get the same message: ids and bits of log-probabilities, rollout by rollout.
    own = transfers.select(transfers.source == grid.rank)
    for_replica: list[list[Tensor]] = [[torch.zeros(0, dtype=torch.int32)] for _ in range(grid.dp_size)]
    for slot, target in zip(own.slots(), own.target.tolist(), strict=True):
        ids = held[slot].token_ids.int()
        if episode := held[slot].episode:
            ids = torch.where(episode.sampled, ids, ~ids)
        for_replica[target] += ids, held[slot].log_probs.view(torch.int32)
    parts = [torch.cat(pieces) for pieces in for_replica]
    replica_of = {rank: i for i, ranks in enumerate(grid.replicas) for rank in ranks}

    # Every rank knows the size of each message, so sizes are not exchanged.
    coming = transfers.select(transfers.target == grid.dp_rank)
    coming = coming.select(coming.source.argsort(stable=True))
    sizes = 2 * _sums(coming.source, coming.tokens, grid.world_size)
    received = collectives.all_to_all([parts[replica_of[rank]] for rank in range(grid.world_size)], sizes.tolist())

    # `received` has the order of `coming`: by sending rank, then by group and rollout.
    pieces = received.split(coming.tokens.repeat_interleave(2).tolist())
    rows = zip(coming.slots(), pieces[::2], pieces[1::2], strict=True)
    return {(g, s): Rollout(s, ids.long(), bits.view(torch.float32), "cut") for (g, s), ids, bits in rows}


def _sums(index: Tensor, values: Tensor, size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int64).index_add(0, index, values)


def _bytes_sent(transfers: _Transfers, grid: Grid) -> int:
    """Return the bytes sent between all ranks: a rollout goes to each rank of its replica except its holder."""
    is_member = torch.zeros(grid.world_size, grid.dp_size, dtype=torch.bool)
    for i, ranks in enumerate(grid.replicas):
        is_member[ranks, i] = True
    copies = grid.mp_size - is_member[transfers.source, transfers.target].long()
    return TOKEN_BYTES * int((transfers.tokens * copies).sum())
