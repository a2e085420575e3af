"""Assignment of rows to replicas that balances the cost of the update.

The cost of a row is the number of its tokens plus that of its pairs of tokens that attend to each other, in units of
one token that passes the layers. A prompt that siblings share costs a replica once, with the first sibling it gets.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_brorl.families.shape import ModelShape
from megatron_brorl.parallel.flops import layer_weights, pair_flops
from megatron_brorl.parallel.packing import LEAST_GAIN

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class CostModel:
    """Cost of rows from their tokens."""

    pair: float  # cost of a pair of tokens, see pair_cost
    limit: int  # tokens of a micro-batch
    share: bool  # config key train.share_prompt

    def rows(self, prompts: Ints, responses: Ints, families: Ints) -> tuple[Ints, Ints]:
        """Return the cost of each row [rows] and that of its prompt if it is shared [rows], rounded to tokens.

        prompts, responses: tokens [rows]. families: the prompt of each row [rows], counted from 0.
        """
        # A row with its own prompt: each token attends to the tokens before it.
        total = prompts + responses
        plain = total + self.pair * total**2 / 2

        # A shared prompt is computed again in each further micro-batch that has siblings.
        prompt = prompts + self.pair * prompts**2 / 2
        copies = np.minimum(responses / self.limit, 1.0)
        own = responses + self.pair * responses * (prompts + responses / 2) + copies * prompt

        # Packing shares prompts only if that saves enough tokens. Sums of integers are the same on every processor.
        _, first = np.unique(families, return_index=True)
        shared_tokens = int((responses + _rounded(copies * prompts)).sum() + prompts[first].sum())
        if not self.share or int(total.sum()) < LEAST_GAIN * shared_tokens:
            return _rounded(plain), np.zeros_like(prompts)
        return _rounded(own), _rounded(prompt)


def pair_cost(shape: ModelShape) -> float:
    """Return the operations of attention between two tokens over those of one token in all matrix products."""
    return pair_flops(shape) / (2 * (layer_weights(shape) + shape.hidden * shape.vocab))


def assign(costs: Ints, parts: int, families: Ints | None = None, setups: Ints | None = None) -> Ints:
    """Return the part of each row [rows] such that the parts have similar costs.

    setups: the additional cost of a part's first row of a family (counted from 0) [rows]. All ranks compute the same
    result, because it depends on integers only.
    """
    if parts == 1 or not len(costs):
        return np.zeros(len(costs), dtype=np.int64)
    if families is None or setups is None or not setups.any():
        return _longest_first(costs, parts)

    return _in_runs(costs, parts, families, setups)


def _longest_first(costs: Ints, parts: int) -> Ints:
    """Assign rows in descending order of cost, each to the part with the lowest cost so far.

    Graham (1969), "Bounds on multiprocessing timing anomalies". With many rows per part, costs differ by about the
    smallest row.
    """
    order = np.argsort(-costs, kind="stable")
    # One integer per part, load * parts + part, so that the smallest one includes its part.
    heap = list(range(parts))
    chosen = []
    for cost in (costs[order] * parts).tolist():
        least = heap[0]
        chosen.append(least % parts)
        heapq.heapreplace(heap, least + cost)

    found = np.empty_like(costs)
    found[order] = chosen
    return found


def _in_runs(costs: Ints, parts: int, families: Ints, setups: Ints) -> Ints:
    """Order rows by family and cut them into runs of equal cost, so that few families are on several parts."""
    order = np.lexsort((-costs, families))
    _, first = np.unique(families[order], return_index=True)

    # A row belongs to the part that contains its middle.
    spent = costs[order]
    spent[first] += setups[order][first]
    middle = 2 * spent.cumsum() - spent
    found = np.empty_like(costs)
    found[order] = middle * parts // (2 * int(spent.sum()))
    return found


def loads_of(parts: int, assigned: Ints, costs: Ints, families: Ints, setups: Ints) -> Ints:
    """Return the cost of every part [parts]: that of its rows, and one prompt for each of its families."""
    loads = np.zeros(parts, dtype=np.int64)
    np.add.at(loads, assigned, costs)
    _, first = np.unique(assigned * (int(families.max(initial=0)) + 1) + families, return_index=True)
    np.add.at(loads, assigned[first], setups[first])
    return loads


def _rounded(values: npt.NDArray[np.float64]) -> Ints:
    return np.rint(values).astype(np.int64)
