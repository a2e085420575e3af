"""The figure of `brorl advise`: what each N keeps, leaves unsampled, and costs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from megatron_brorl.algo.estimators import Interval
from megatron_brorl.report.style import BLUE, GREEN, GREY, ORANGE, RED, panel, save, say
from megatron_brorl.theory.advisor import Advice
from megatron_brorl.theory.targets import Targets


def plot_advice(advice: Advice, targets: Targets, unit: str, path: Path) -> Path:
    """Write the figure and return its path."""
    return save(build_figure(advice, targets, unit), path)


def build_figure(advice: Advice, targets: Targets, unit: str) -> Figure:
    """Four panels, in reading order in `figure.axes`. Full markers: up to the pilot's n; hollow: beyond."""
    figure = Figure(figsize=(10.5, 7.6), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))

    # The title is the recommendation.
    found, c = advice.candidates, advice.recommended
    choice = "no N meets the targets" if c is None else f"recommended N = {c}"
    low, high = advice.pilot_n
    pilot = f"{low}" if low == high else f"{low} to {high}"  # groups may differ in size
    figure.suptitle(f"{choice}   ·   pilot: {advice.prompts} prompts, n = {pilot}", fontsize=13)
    (kept, left), (work, time) = figure.subplots(2, 2)

    # What N brings, each figure with its target as a line.
    panel(kept, "Dynamic sampling", "prompts kept", "N (rollouts per prompt)")
    _curve(kept, advice, [x.kept for x in found], [x.kept_known == "unbiased" for x in found], BLUE, "extrapolated")
    kept.axhline(targets.kept * found[-1].kept.mean, color=GREY, linestyle="--", linewidth=1)
    kept.set_ylim(-0.03, 1.03)
    kept.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))

    # Unknown without outcomes: the panel stays and says so.
    panel(left, "Unsampled coupling", "left of the whole", "N (rollouts per prompt)")  # of the third term of Theorem 1
    shares = [x.coupling for x in found if x.coupling is not None]  # None: unknown
    if shares:
        _curve(left, advice, shares, [x.coupling_known == "ratio" for x in found], RED, "at most")
        left.axhline(targets.coupling, color=GREY, linestyle="--", linewidth=1)
        left.set_ylim(bottom=0)
        left.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    else:
        say(left, "no outcomes in the log, or none twice")

    # What it costs.
    panel(work, "Signal per time", "share of the best N", "N (rollouts per prompt)")
    shares = [Interval(x.efficiency, x.efficiency, x.efficiency) for x in found]  # no interval
    _curve(work, advice, shares, [x.kept_known == "unbiased" for x in found], GREEN)
    work.axhline(targets.efficiency, color=GREY, linestyle="--", linewidth=1, label="target")
    work.set_ylim(0, 1.05)
    work.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    work.legend(frameon=False, fontsize=9, loc="lower right")

    # Intervals of the cost are those of the kept share: the times are taken as known.
    panel(time, "Cost", f"per step ({unit})", "N (rollouts per prompt)")
    _curve(time, advice, [x.seconds for x in found], [x.kept_known == "unbiased" for x in found], ORANGE)
    time.set_yscale("log")  # costs grow in proportion to N

    # One axis of N for all; a bar behind the recommended one.
    for axes in figure.axes:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator([x.n for x in found]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticklabels([str(x.n) for x in found])
        if c is not None:
            axes.axvline(c, color=GREY, linewidth=6, alpha=0.25, zorder=0)

    return figure


def _curve(
    axes: Axes, advice: Advice, values: list[Interval], sure: list[bool], color: str, beyond: str | None = None
) -> None:
    """Means with their intervals; hollow where the pilot has too few rollouts to estimate the value."""
    n = np.array([x.n for x in advice.candidates])
    mean, low, high = np.array([(v.mean, v.low, v.high) for v in values]).T
    known = np.array(sure)
    axes.plot(n, mean, color=color, linewidth=1.6)
    axes.plot(n[known], mean[known], "o", color=color, markersize=6)
    axes.plot(n[~known], mean[~known], "o", color=color, markersize=6, markerfacecolor="white", label=beyond)
    if (high > low).any():
        axes.fill_between(n, low, high, color=color, alpha=0.18, linewidth=0, label="95% interval")
        axes.legend(frameon=False, fontsize=9)
