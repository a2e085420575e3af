"""Which replica trains on which rollout: all replicas are to be done with every optimizer step at one time.

Replicas wait for each other at each optimizer step, so that the rows of each are shared out on their own, by what they
are predicted to cost. All lengths are known by then, on every rank, and every rank comes to the same assignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_brorl.config.schema import AlgoConfig
from megatron_brorl.parallel.balance import CostModel, assign, loads_of, pair_cost
from megatron_brorl.train.groups import Outcomes, mini_batch_of, trained
from megatron_brorl.train.worker import Worker


@dataclass(frozen=True)
class Assignment:
    """The same on every rank."""

    replica: Tensor  # int64 [groups, N], that trains on the rollout; -1: none
    balance: float  # mean over replicas by maximum of the predicted cost, summed over optimizer steps; 1 without rows


def cost_model(worker: Worker) -> CostModel:
    """What training on a row costs this actor."""
    options = worker.options
    limit = options.tokens_per_micro_batch * worker.grid.context
    return CostModel(pair_cost(worker.shape), limit, options.share_prompt)


def assign_rows(
    outcomes: Outcomes, prompt_tokens: Sequence[int], algo: AlgoConfig, costs: CostModel, replicas: int
) -> Assignment:
    """A replica for every rollout that is trained on; prompt_tokens: of each group."""
    replica = torch.full_like(outcomes.state, -1)
    group, sibling = trained(outcomes, algo.overlong_filter).nonzero(as_tuple=True)
    prompts = torch.tensor(prompt_tokens, dtype=torch.int64)[group]
    responses = outcomes.tokens[group, sibling]

    place = torch.zeros(len(outcomes.state), dtype=torch.int64)
    place[outcomes.kept] = torch.arange(len(outcomes.kept))
    steps = mini_batch_of(place[group], sibling, algo.mini_batches, algo.mini_batch_of)

    # Each one on its own, since replicas meet after it.
    mean, most = 0.0, 0
    for step in range(algo.mini_batches):
        rows = (steps == step).nonzero()[:, 0]
        families = group[rows].numpy()
        own, setups = costs.rows(prompts[rows].numpy(), responses[rows].numpy(), families)
        assigned = assign(own, replicas, families, setups)
        replica[group[rows], sibling[rows]] = torch.from_numpy(assigned)

        loads = loads_of(replicas, assigned, own, families, setups)
        mean += float(loads.mean())
        most += int(loads.max())
    return Assignment(replica, mean / most if most else 1.0)
