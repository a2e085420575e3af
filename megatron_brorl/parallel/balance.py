"""Assignment of rows to replicas that balances the cost of the update.

The cost of a row has two terms: its tokens, and its pairs of tokens that attend to each other. The unit is the cost of
all matrix products for one token. A shared prompt costs a replica once, with the first of its rows.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_brorl.families.shape import ModelShape
from megatron_brorl.parallel.flops import layer_weights, pair_flops
from megatron_brorl.parallel.packing import MIN_SHARING_GAIN

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class CostModel:
    """Estimates the cost of rows."""

    pair: float  # cost of a pair of tokens, see pair_cost
    limit: int  # maximum number of tokens of a micro-batch
    share: bool  # config key train.share_prompt

    def rows(self, prompt_len: Ints, response_len: Ints, prompt_index: Ints) -> tuple[Ints, Ints]:
        """Return the cost of each row [rows], and the additional cost of its prompt if that is shared [rows].

        Costs are rounded to integers. prompt_len, response_len: tokens [rows]. prompt_index: number of each prompt.
        """
        # A row with its own prompt: each token attends to the tokens before it.
        tokens = prompt_len + response_len
        plain_cost = tokens + self.pair * tokens**2 / 2

        # A shared prompt is computed again in each further micro-batch with responses to it.
        prompt_cost = prompt_len + self.pair * prompt_len**2 / 2
        copies = np.minimum(response_len / self.limit, 1.0)
        shared_cost = response_len + self.pair * response_len * (prompt_len + response_len / 2) + copies * prompt_cost

        # Packing shares prompts only if that saves enough tokens. Integer sums do not depend on the processor.
        _, first = np.unique(prompt_index, return_index=True)
        shared_tokens = int((response_len + _rounded(copies * prompt_len)).sum() + prompt_len[first].sum())
        if not self.share or int(tokens.sum()) < MIN_SHARING_GAIN * shared_tokens:
            return _rounded(plain_cost), np.zeros_like(prompt_len)
        return _rounded(shared_cost), _rounded(prompt_cost)


def pair_cost(shape: ModelShape) -> float:
    """Return the operations of attention between two tokens, divided by those of all matrix products for one token."""
    return pair_flops(shape) / (2 * (layer_weights(shape) + shape.hidden * shape.vocab))


def assign(costs: Ints, parts: int, prompt_index: Ints | None = None, prompt_costs: Ints | None = None) -> Ints:
    """Assign each row to one of `parts` parts of similar cost; return the index of its part [rows].

    prompt_index: index of each row's prompt [rows]. prompt_costs: additional cost of a part's first row of a prompt
    [rows]. All ranks compute the same result, because it depends only on integers.
    """
    if prompt_index is None or prompt_costs is None or not prompt_costs.any():
        return _longest_first(costs, parts)
    return _in_runs(costs, parts, prompt_index, prompt_costs)


def _longest_first(costs: Ints, parts: int) -> Ints:
    """Assign rows in descending order of cost, each to the part with the lowest cost so far.

    Graham (1969), "Bounds on multiprocessing timing anomalies". With many rows, costs differ by about the smallest row.
    """
    order = np.argsort(-costs, kind="stable")
    # One integer per part: load * parts + part. The smallest integer thus also names its part.
    heap = list(range(parts))
    chosen = []
    for cost in (costs[order] * parts).tolist():
        smallest = heap[0]
        chosen.append(smallest % parts)
        heapq.heapreplace(heap, smallest + cost)

    part_of_row = np.empty_like(costs)
    part_of_row[order] = chosen
    return part_of_row


def _in_runs(costs: Ints, parts: int, prompt_index: Ints, prompt_costs: Ints) -> Ints:
    """Sort rows by prompt and split them into runs of equal cost, so that few prompts are in several parts."""
    order = np.lexsort((-costs, prompt_index))
    _, first = np.unique(prompt_index[order], return_index=True)

    # A row belongs to the part that contains the middle of its range of costs.
    sorted_costs = costs[order]
    sorted_costs[first] += prompt_costs[order][first]
    twice_middle = 2 * sorted_costs.cumsum() - sorted_costs
    part_of_row = np.empty_like(costs)
    part_of_row[order] = twice_middle * parts // (2 * int(sorted_costs.sum()))
    return part_of_row


def loads_of(parts: int, assigned: Ints, costs: Ints, prompt_index: Ints, prompt_costs: Ints) -> Ints:
    """Return the cost of every part [parts]: the costs of its rows, and the cost of each distinct prompt once."""
    loads = np.zeros(parts, dtype=np.int64)
    np.add.at(loads, assigned, costs)
    # One integer for each pair of a part and a prompt.
    _, first = np.unique(assigned * (int(prompt_index.max(initial=0)) + 1) + prompt_index, return_index=True)
    np.add.at(loads, assigned[first], prompt_costs[first])
    return loads


def _rounded(values: npt.NDArray[np.float64]) -> Ints:
    return np.rint(values).astype(np.int64)
