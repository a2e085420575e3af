"""How many prompts and how many rollouts of each, together: the least noise of the gradient for the price of a step.

The mean gradient of P prompts with N rollouts each varies by (between + within / (N - 1)) / P (theory.noise). A prompt
costs c_p, each of its rollouts c_s, and a step has a budget, which buys P = budget / (c_p + N c_s) prompts. Where P and
N need not be whole, the noise is least at

    N = 1 + sqrt( within (c_p + c_s) / (between c_s) )

whatever the budget is. (With within / N for the variance, sqrt(within c_p / (between c_s)).)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_brorl.errors import UserError
from megatron_brorl.metrics import read_metrics
from megatron_brorl.theory import mixture
from megatron_brorl.theory.costs import Costs

Floats = npt.NDArray[np.float64]

FEWEST_STEPS = 3  # measured ones, without which there is no interval
UNKNOWN = (  # that no figure here says, in whatever case
    "what less noise is worth in right answers, what Adam makes of it (measured is a plain step's), "
    "and the noise of later weights"
)


@dataclass(frozen=True)
class Together:
    """Prompts to draw per step, before those without a signal are dropped, and rollouts of each."""

    prompts: int
    n: int
    n_low: int  # 95% bootstrap interval over measured steps
    n_high: int
    unbounded: bool  # the interval holds a noise between prompts of 0: then only the budget ends N
    against: float  # the noise over that of `pilot`
    pilot: tuple[int, int]  # prompts and rollouts of each in the log
    budget: float  # of a step, in costs.unit, without its fixed part
    between: float
    within: float
    steps: int  # measured


def prices(costs: Costs, rates: Floats, largest: int) -> Floats:
    """Of a prompt with N = 2 ... `largest` rollouts [largest - 1], those that are trained on included.

    rates [G]: the distribution of success rates on mixture.GRID, which tells how often a prompt is trained on.
    """
    grid = mixture.GRID
    kept = [float(rates @ (1 - grid**n - (1 - grid) ** n)) for n in range(2, largest + 1)]
    return np.array([costs.prompt(n, share) for n, share in enumerate(kept, start=2)])


def best(between: float, within: float, price: Floats, budget: float) -> tuple[int, int]:
    """(prompts, N) of the least noise within the budget, of all whole numbers.

    price [K]: of a prompt with N = 2 ... K + 1 rollouts. Raises UserError where the budget does not buy one prompt.
    """
    n = np.arange(2, len(price) + 2)
    prompts = np.floor(budget / price * (1 + 1e-12))  # a budget that is a whole number of prompts buys them
    if prompts.max() < 1:
        raise UserError(f"--budget {budget:g}: one prompt with 2 rollouts costs {price[0]:.4g}")
    noise = (max(between, 0.0) + within / (n - 1)) / np.where(prompts < 1, np.nan, prompts)
    at = int(np.nanargmin(noise))
    return int(prompts[at]), int(n[at])


def read_noise(runs: Sequence[Path]) -> Floats:
    """(between, within) of every step of the runs that measured them [steps, 2]. Raises UserError."""
    rows = [row for run in runs for row in read_metrics(run / "metrics.jsonl")]
    names = ("theory_estimate/between", "theory_estimate/within")
    found = [[row[name] for name in names] for row in rows if all(row.get(name) is not None for name in names)]
    return np.array(found, dtype=np.float64).reshape(-1, 2)


def together(
    noise: Floats, price: Floats, pilot: tuple[int, int], budget: float | None, resamples: int, seed: int
) -> Together | None:
    """From the measured steps [steps, 2], which one mean is taken over. None: too few, or no noise told from 0.

    price: as best takes it. pilot: prompts and rollouts of each as they were, whose price is the budget where none is
    given. Raises UserError where the budget does not buy one prompt.
    """
    # Without a noise between prompts, and within them, there is nothing to weigh.
    if len(noise) < FEWEST_STEPS or not (noise.mean(0) > 0).all():
        return None
    # Both figures of a step are unbiased, their ratio is not: it is taken of the means.
    between, within = (float(x) for x in noise.mean(0))
    prompts_before, n_before = pilot

    # A pilot of larger groups than are compared is priced at the largest.
    per_prompt = float(price[min(n_before, len(price) + 1) - 2])
    budget = prompts_before * per_prompt if budget is None else budget
    prompts, n = best(between, within, price, budget)

    # Steps are drawn anew, each with both of its figures: they come from the same gradients.
    draw = np.random.Generator(np.random.Philox(key=seed % 2**64)).multinomial
    times = draw(len(noise), np.full(len(noise), 1 / len(noise)), size=resamples) / len(noise)
    means = times @ noise  # [resamples, 2]
    # A sample in which prompts do not differ takes as many rollouts as it can.
    others = [best(float(b), max(float(w), 0.0), price, budget)[1] for b, w in means]
    low, high = np.percentile(others, [2.5, 97.5], method="nearest")

    # What it gains over the pilot's own choice.
    now, before = ((between + within / (k - 1)) / p for p, k in ((prompts, n), pilot))
    return Together(
        prompts=prompts,
        n=n,
        n_low=int(min(low, n)),
        n_high=int(max(high, n)),
        unbounded=bool((means[:, 0] <= 0).mean() > 0.025),
        against=now / before,
        pilot=pilot,
        budget=budget,
        between=between,
        within=within,
        steps=len(noise),
    )


def text(found: Together | None, costs: Costs) -> str:
    """Lines for people, with what is not known."""
    if found is None:
        return (
            "together unknown: prompts and N are weighed by the gradient's noise, of which no run here has measured "
            f"{FEWEST_STEPS} steps that tell it from 0 (theory.noise_every, and the run with --run)"
        )
    top = "what the budget buys" if found.unbounded else str(found.n_high)
    alone = "" if costs.prefill else ", and a prompt's own price (--prefill, or --run of two N), here 0"
    (prompts, n), budget = found.pilot, f"{found.budget:.4g} {costs.unit} a step"
    return "\n".join(
        [
            f"together {found.prompts} prompts of N = {found.n} (95% interval of N {found.n_low} to {top}) for {budget}"
            f": {found.against:.2f} of the gradient's noise of {prompts} prompts of N = {n}",
            f"noise    between prompts {found.between:.3g}, within them {found.within:.3g} / (N - 1), of {found.steps} "
            "measured steps",
            f"unknown  {UNKNOWN}{alone}",
        ]
    )
