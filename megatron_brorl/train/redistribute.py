"""Send each rollout from the rank that sampled it to the replica that trains on it.

Replicas wait for each other at every optimizer step, so the rollouts of each optimizer step are balanced separately, by
their predicted cost. All ranks know all lengths and compute the same assignment.

Only tokens, log-probabilities and recorded routes are sent: 8 bytes per token, and 1 or 2 for each chosen expert. A
token of an environment is sent as the bitwise complement of its id, which is negative. The first token of an agent's
sequence also has the bit _START.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_brorl.config.schema import AlgoConfig
from megatron_brorl.errors import UserError
from megatron_brorl.parallel import collectives
from megatron_brorl.parallel.balance import CostModel, assign, loads_of, pair_cost
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.train.groups import Outcomes, Subset, mini_batch_of
from megatron_brorl.train.worker import Worker
from megatron_brorl.types import Rollout, ScoredRollout, TrainingRollout

_START = 1 << 30  # set in the first token of an agent's sequence
MESSAGE_BYTES = 2**28  # bytes that a rank sends or receives per message, approximately


def cost_model(worker: Worker) -> CostModel:
    """Return the cost of training this actor on a rollout."""
    options = worker.options
    limit = options.tokens_per_micro_batch * worker.grid.cp_size
    return CostModel(pair=pair_cost(worker.shape), limit=limit, share=options.share_prompt)


def assign_replicas(
    outcomes: Outcomes, subset: Subset, prompt_tokens: Sequence[int], algo: AlgoConfig, costs: CostModel, replicas: int
) -> tuple[Tensor, float]:
    """Return the replica of each rollout of the subset, int64 [groups, N] with -1 for others, and the balance.

    The balance is the mean predicted cost of the replicas in an optimizer step, summed over steps, divided by their
    largest predicted cost, also summed over steps; 1 without rollouts. prompt_tokens: of each group.
    """
    replica = torch.full_like(outcomes.state, -1)
    group, sibling = subset.mask.nonzero(as_tuple=True)
    prompt_len = torch.tensor(prompt_tokens, dtype=torch.int64)[group]
    response_len = outcomes.tokens[group, sibling]

    kept_index = torch.zeros(len(outcomes.state), dtype=torch.int64)
    kept_index[outcomes.kept] = torch.arange(len(outcomes.kept))
    mini_batch = mini_batch_of(
        kept_index[group], subset.deal_order[group, sibling], algo.mini_batches, algo.mini_batch_of
    )

    mean_loads = 0.0
    largest_loads = 0
    for i in range(algo.mini_batches):
        rows = (mini_batch == i).nonzero()[:, 0]
        groups = group[rows].numpy()
        # A replica computes a shared prompt once for all of its rollouts of a group.
        own_costs, prompt_costs = costs.rows(prompt_len[rows].numpy(), response_len[rows].numpy(), groups)
        assigned = assign(own_costs, replicas, groups, prompt_costs)
        replica[group[rows], sibling[rows]] = torch.from_numpy(assigned)

        loads = loads_of(replicas, assigned, own_costs, groups, prompt_costs)
        mean_loads += float(loads.mean())
        largest_loads += int(loads.max())
    return replica, mean_loads / largest_loads if largest_loads else 1.0


@dataclass(frozen=True)
class Transfers:
    """1-D tensors to send, one for each of K rollouts, in (group, sibling) order; each field [K] int64."""

    group: Tensor
    sibling: Tensor
    source: Tensor  # rank
    target: Tensor  # replica
    length: Tensor  # of the tensor

    def select(self, rows: Tensor | slice) -> Transfers:
        return Transfers(**{name: column[rows] for name, column in vars(self).items()})

    def slots(self) -> list[tuple[int, int]]:
        return list(zip(self.group.tolist(), self.sibling.tolist(), strict=True))


def send_to_replicas(
    rollouts: Sequence[ScoredRollout],
    outcomes: Outcomes,
    replica: Tensor,
    grid: Grid,
    prompt_tokens: Sequence[int] = (),
    no_routes: Tensor | None = None,
) -> tuple[list[TrainingRollout], int]:
    """Send every rollout to all ranks of its replica. Collective.

    Returns the rollouts of this replica in order, the same on all of its ranks, and the bytes sent between all ranks.
    rollouts: of this rank. outcomes: of all ranks. replica: int64 [groups, N] from assign_replicas. prompt_tokens: of
    each group. no_routes: routes [0, layers, k] of no token, if rollouts have routes.
    """
    group, sibling = (replica >= 0).nonzero(as_tuple=True)
    holder, target, tokens = (column[group, sibling] for column in (outcomes.holder, replica, outcomes.tokens))
    replica_of = replica.tolist()
    own = {(r.group, r.rollout.index): r.rollout for r in rollouts if replica_of[r.group][r.rollout.index] >= 0}

    def ids_and_bits(rollout: Rollout) -> Tensor:
        ids = rollout.token_ids.int()
        if episode := rollout.episode:
            ids[list(episode.starts)] += _START
            ids = torch.where(episode.sampled, ids, ~ids)
        return torch.cat((ids, rollout.log_probs.view(torch.int32)))

    transfers = Transfers(group, sibling, holder, target, 2 * tokens)
    received, moved = send(transfers, {slot: ids_and_bits(r) for slot, r in own.items()}, torch.int32, grid)
    routes: dict[tuple[int, int], Tensor] = {}
    if no_routes is not None:
        routed_tokens = torch.tensor(prompt_tokens)[group] + tokens - 1
        transfers = replace(transfers, length=no_routes.shape[1:].numel() * no_routes.itemsize * routed_tokens)
        own_routes = {slot: r.routes.flatten().view(torch.uint8) for slot, r in own.items() if r.routes is not None}
        if len(own_routes) < len(own):
            raise UserError(
                f"rollout.replay_routes: {len(own) - len(own_routes)} rollouts of the checkpoint were sampled without "
                'it: set "never" until they are trained on'
            )
        routes, bytes_of_routes = send(transfers, own_routes, torch.uint8, grid)
        routes = {slot: x.view(no_routes.dtype).view(-1, *no_routes.shape[1:]) for slot, x in routes.items()}
        moved += bytes_of_routes

    result = []
    # Lists, because reading one element of a tensor takes microseconds.
    is_right = outcomes.right.tolist()
    has_environment = (outcomes.sampled < outcomes.tokens).tolist()
    for g, s in sorted(received):
        ids, bits = received[g, s].chunk(2)
        ids = ids.long()
        sampled, starts = None, ()
        if has_environment[g][s]:
            sampled = ids >= 0
            ids = torch.where(sampled, ids, ~ids)
            starts = tuple((ids >= _START).nonzero()[:, 0].tolist())
            ids = ids % _START
        log_probs = bits.view(torch.float32)
        result.append(TrainingRollout(g, s, ids, log_probs, is_right[g][s], sampled, starts, routes.get((g, s))))
    return result, moved


def send(
    transfers: Transfers, own: Mapping[tuple[int, int], Tensor], dtype: torch.dtype, grid: Grid
) -> tuple[dict[tuple[int, int], Tensor], int]:
    """Send this rank's tensors [length], by group and rollout index. Collective.

    Returns the tensors that this rank's replica receives, and the bytes sent between all ranks.
    """
    # Use as many messages as MESSAGE_BYTES requires on the busiest rank.
    sent = _sums(transfers.source, transfers.length, grid.world_size) * grid.mp_size
    received = _sums(transfers.target, transfers.length, grid.dp_size)
    messages = -(-int(max(sent.max(), received.max())) * dtype.itemsize // MESSAGE_BYTES)  # rounded up
    tensors: dict[tuple[int, int], Tensor] = {}
    for i in range(messages):
        tensors |= _exchange(transfers.select(slice(i, None, messages)), own, dtype, grid)
    # A tensor goes to each rank of its replica except its holder.
    is_member = torch.zeros(grid.world_size, grid.dp_size, dtype=torch.bool)
    for i, ranks in enumerate(grid.replicas):
        is_member[ranks, i] = True
    copies = grid.mp_size - is_member[transfers.source, transfers.target].long()
    return tensors, dtype.itemsize * int((transfers.length * copies).sum())


def _exchange(
    transfers: Transfers, tensors: Mapping[tuple[int, int], Tensor], dtype: torch.dtype, grid: Grid
) -> dict[tuple[int, int], Tensor]:
    """Exchange one message between all ranks; see send. Collective."""
    # All ranks of a replica get the same message.
    own = transfers.select(transfers.source == grid.rank)
    for_replica: list[list[Tensor]] = [[torch.zeros(0, dtype=dtype)] for _ in range(grid.dp_size)]
    for slot, target in zip(own.slots(), own.target.tolist(), strict=True):
        for_replica[target].append(tensors[slot])
    parts = [torch.cat(pieces) for pieces in for_replica]
    replica_of = {rank: i for i, ranks in enumerate(grid.replicas) for rank in ranks}

    # Every rank knows the size of each message, so sizes are not exchanged.
    incoming = transfers.select(transfers.target == grid.dp_rank)
    incoming = incoming.select(incoming.source.argsort(stable=True))
    sizes = _sums(incoming.source, incoming.length, grid.world_size)
    received = collectives.all_to_all([parts[replica_of[rank]] for rank in range(grid.world_size)], sizes.tolist())
    # `received` has the order of `incoming`: by sending rank, then by group and rollout.
    return dict(zip(incoming.slots(), received.split(incoming.length.tolist()), strict=True))


def _sums(index: Tensor, values: Tensor, size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int64).index_add(0, index, values)
