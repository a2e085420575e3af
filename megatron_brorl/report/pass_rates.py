"""Success rates of a run's prompts, from its recorded groups, and their figure."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from megatron_brorl.errors import UserError
from megatron_brorl.report.plots import BLUE, panel, save
from megatron_brorl.rollout_log import FOLDER, moments, read_groups
from megatron_brorl.theory.pass_rates import SIZES, Floats, Ints


def latest_groups(run: Path) -> tuple[str, Ints, Ints]:
    """Return "step" or "evaluation", and the right and all rollouts [P] in the last group of each prompt.

    Groups of training steps are read, or those of evaluations if there are none. Raises UserError if nothing is
    recorded.
    """
    there = moments(run / FOLDER)
    kind = "step" if any(m.kind == "step" for m in there) else "evaluation"
    last: dict[str, tuple[int, int]] = {}
    for moment in (m for m in there if m.kind == kind):
        columns = read_groups(run / FOLDER, moment).to_pydict()
        for prompt, right, rollouts in zip(*(columns[k] for k in ("prompt_id", "right", "rollouts")), strict=True):
            if rollouts:
                last[prompt] = right, rollouts
    if not last:
        raise UserError(f"{run / FOLDER}: no group with rollouts is recorded")
    right, rollouts = np.array(list(last.values())).T
    return kind, right, rollouts


def plot_pass_rates(rates: Floats, shares: list[float], path: Path) -> Path:
    """Draw the distribution of success rates [P] and the share of mixed groups for each N of SIZES."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    panel(left, "Success rates of prompts", "prompts", "success rate")
    left.hist(rates, bins=np.linspace(0, 1, 21).tolist(), color=BLUE)
    left.set_xticks(np.linspace(0, 1, 6))
    panel(right, "Groups with right and wrong rollouts", "share of prompts", "N (rollouts per prompt)")
    right.plot(SIZES, shares, "o-", color=BLUE)
    right.set_xscale("log", base=2)
    right.set_xticks(SIZES, [str(n) for n in SIZES])
    right.set_ylim(0, 1.03)
    right.yaxis.set_major_formatter(PercentFormatter(1.0))
    return save(figure, path)
