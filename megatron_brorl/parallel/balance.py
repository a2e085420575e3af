"""Rows over replicas, so that all of them are done at one time: what a row costs, and who takes it.

A row costs the tokens that pass the layers for it and the pairs of tokens that attend to each other, in units of one
token through the layers. A prompt that is stored once for its siblings costs a replica once, for the first of them that
it takes.
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
    """What the cost of a row depends on, beside its tokens."""

    pair: float  # cost of attention between two tokens, see pair_cost
    limit: int  # tokens of a micro-batch
    share: bool  # config key train.share_prompt

    def rows(self, prompts: Ints, responses: Ints, families: Ints) -> tuple[Ints, Ints]:
        """The cost of each row [rows], and of the prompt of a replica's first sibling [rows]; rounded to tokens.

        prompts, responses: tokens [rows]. families: the prompt of each row [rows], counted from 0.
        """
        # With a prompt of its own: each token attends to those before it.
        total = prompts + responses
        plain = total + self.pair * total**2 / 2

        # With a shared one: it is computed anew wherever siblings spill into a further micro-batch.
        prompt = prompts + self.pair * prompts**2 / 2
        copies = np.minimum(responses / self.limit, 1.0)
        own = responses + self.pair * responses * (prompts + responses / 2) + copies * prompt

        # Packing shares where that saves tokens enough.
        _, first = np.unique(families, return_index=True)
        # Added up as integers, whose sums no processor rounds.
        shared_tokens = int((responses + _rounded(copies * prompts)).sum() + prompts[first].sum())
        if not self.share or int(total.sum()) < LEAST_GAIN * shared_tokens:
            return _rounded(plain), np.zeros_like(prompts)
        return _rounded(own), _rounded(prompt)


def pair_cost(shape: ModelShape) -> float:
    """Operations of attention between two tokens over those of one token through all matrices.

    A matrix product takes 2 operations per weight and token. Scores and their product with the values take 2 each per
    pair and query component. The backward pass doubles both.
    """
    return pair_flops(shape) / (2 * (layer_weights(shape) + shape.hidden * shape.vocab))


def assign(costs: Ints, parts: int, families: Ints | None = None, setups: Ints | None = None) -> Ints:
    """The part of each row [rows], so that the part with the most has little more than the others.

    setups: what a part's first row of a family (counted from 0) costs in addition [rows]; without them a row costs the
    same everywhere. Integers in and out, so that every processor comes to the same result.
    """
    if parts == 1 or not len(costs):
        return np.zeros(len(costs), dtype=np.int64)
    if families is None or setups is None or not setups.any():
        return _longest_first(costs, parts)

    # One row at a time balances best; whole runs of siblings pay each prompt least often.
    candidates = _where_done_first(costs, parts, families, setups), _in_runs(costs, parts, families, setups)
    return min(candidates, key=lambda found: int(loads_of(parts, found, costs, families, setups).max()))


def _longest_first(costs: Ints, parts: int) -> Ints:
    """From the costliest row on, each goes to the part with the least.

    The order of Graham (1969), "Bounds on multiprocessing timing anomalies", which with many rows per part leaves parts
    that differ by about the smallest row.
    """
    order = np.argsort(-costs, kind="stable")
    # One integer per part, load * parts + part, so that the least of them names its part.
    heap = list(range(parts))
    chosen = []
    for cost in (costs[order] * parts).tolist():
        least = heap[0]
        chosen.append(least % parts)
        heapq.heapreplace(heap, least + cost)

    found = np.empty_like(costs)
    found[order] = chosen
    return found


def _where_done_first(costs: Ints, parts: int, families: Ints, setups: Ints) -> Ints:
    """As _longest_first, where a part's first row of a family costs more than its others."""
    # What a part has, and what each family's first row would add to it.
    found = np.empty_like(costs)
    loads = np.zeros(parts, dtype=np.int64)
    extra = np.zeros((int(families.max()) + 1, parts), dtype=np.int64)
    extra[families] = setups[:, None]

    # Ties go to the row and to the part that come first.
    order = np.argsort(-costs, kind="stable")
    for row, family, cost in zip(order.tolist(), families[order].tolist(), costs[order].tolist(), strict=True):
        ends = loads + extra[family]
        part = int(ends.argmin())
        loads[part] = ends[part] + cost
        extra[family, part] = 0
        found[row] = part
    return found


def _in_runs(costs: Ints, parts: int, families: Ints, setups: Ints) -> Ints:
    """Siblings side by side, cut into runs of equal cost: a family is on several parts where a cut falls in it."""
    order = np.lexsort((-costs, families))
    _, first = np.unique(families[order], return_index=True)

    # A row belongs to the part in which its middle lies.
    spent = costs[order]
    spent[first] += setups[order][first]
    middle = 2 * spent.cumsum() - spent
    found = np.empty_like(costs)
    found[order] = middle * parts // (2 * int(spent.sum()))
    return found


def loads_of(parts: int, assigned: Ints, costs: Ints, families: Ints, setups: Ints) -> Ints:
    """The cost of every part [parts] under an assignment: its rows, and one prompt for each of its families."""
    loads = np.zeros(parts, dtype=np.int64)
    np.add.at(loads, assigned, costs)
    _, first = np.unique(assigned * (int(families.max(initial=0)) + 1) + families, return_index=True)
    np.add.at(loads, assigned[first], setups[first])
    return loads


def _rounded(values: npt.NDArray[np.float64]) -> Ints:
    return np.rint(values).astype(np.int64)
