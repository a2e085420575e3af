"""How to spread a budget of tokens over prompts: more rollouts where they are expected to change something."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from megatron_brorl.errors import UserError
from megatron_brorl.theory import mixture
from megatron_brorl.theory.advisor import success_rates

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Objective = Literal["kept", "variance"]


@dataclass(frozen=True)
class Allocation:
    rollouts: Ints  # [P]
    tokens: float  # expected
    value: float  # expected kept prompts, or minus the sum of the variances
    uniform: int  # the largest level that the budget gives to every prompt
    uniform_value: float


def allocate(posterior: Floats, tokens: Floats, budget: float, levels: Ints, objective: Objective) -> Allocation:
    """Rollouts [P] for each prompt, among ascending levels [L], whose expected tokens fit the budget.

    posterior [P, G] over success rates on mixture.GRID; tokens [P] per rollout. "kept": the expected number of prompts
    with a right and a wrong rollout, sum E[1 - s^N - (1 - s)^N]. "variance": minus the sum of E[s (1 - s)] / (N - 1).
    Both have falling returns in N, so taking the best return per token first is optimal up to the one step that no
    longer fits.
    """
    # Every prompt gets the lowest level.
    base = float((tokens * levels[0]).sum())
    if budget < base:
        raise UserError(
            f"a budget of {budget:.0f} tokens: {levels[0]} rollouts for every prompt take {base:.0f} already"
        )

    # The return per token of every step to the next level, best first, until the budget is spent.
    values = _values(posterior, levels, objective)
    returns = np.diff(values, axis=1) / (np.diff(levels) * tokens[:, None])  # [P, L - 1] per token
    prices = np.broadcast_to(np.diff(levels) * tokens[:, None], returns.shape)  # [P, L - 1] tokens
    order = np.argsort(-returns, axis=None, kind="stable")  # of all steps of all prompts
    spent = base + np.cumsum(prices.reshape(-1)[order])
    taken = order[: int(np.searchsorted(spent, budget, side="right"))]

    # Returns fall along a prompt's levels, so the steps that were taken are its first ones.
    steps = np.bincount(taken // returns.shape[1], minlength=len(tokens))  # [P] levels above the lowest

    # What every prompt alike would get for the budget.
    rows = np.arange(len(tokens))
    fits = np.flatnonzero(levels * tokens.sum() <= budget)[-1]

    return Allocation(
        rollouts=levels[steps],
        tokens=float((levels[steps] * tokens).sum()),
        value=float(values[rows, steps].sum()),
        uniform=int(levels[fits]),
        uniform_value=float(values[:, fits].sum()),
    )


def second_round(right: Ints, n: Ints, more: int, objective: Objective) -> Ints:
    """Rollouts [P] of a second round, `more` for each prompt on average, from what a first round brought.

    right, n [P]: right ones among the first rollouts. Every prompt gets an eighth of `more` at least, and two, so that
    the second round alone estimates every prompt's gradient and no rollout weighs more than eight times that of an
    equal share; and at most four times `more`.
    """
    least = least_of(more)
    levels = np.arange(least, max(4 * more, least) + 1, least)
    posterior = success_rates(right, n)[1]
    return allocate(posterior, np.ones(len(n)), more * len(n), levels, objective).rollouts


def least_of(more: int) -> int:
    """The fewest rollouts of second_round."""
    return max(2, -(-more // 8))


def _values(posterior: Floats, levels: Ints, objective: Objective) -> Floats:
    """[P, L]"""
    s = mixture.GRID[:, None]
    if objective == "kept":
        result: Floats = posterior @ (1 - s**levels - (1 - s) ** levels)
        return result
    return -(posterior @ (s * (1 - s))) / (levels - 1)
