"""Figures of a study: every run as a thin line, every arm's mean as a thick one; differences with their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from megatron_brorl.report.style import BLUE, GREY, panel
from study.design import Axis, Design
from study.end_points import Curve, Results, curve, height
from study.inference import PairedT
from study.order import Phase

_AXES: dict[Axis, tuple[str, float]] = {  # label, and what is one unit
    "seconds": ("training seconds", 1.0),
    "rollouts": ("rollouts (thousands)", 1e3),
    "tokens": ("tokens (thousands)", 1e3),
}
_DASHES = ("--", ":", "-.")


def looks(design: Design) -> dict[str, dict[str, Any]]:
    """Colour and stroke by arm: those with a rate of their own from dark (few rollouts) to light, controls dashed in
    the colour of the arm whose rate they have."""
    colours = matplotlib.colormaps["viridis"]
    own = sorted((a for a in design.arms if not a.rate_of), key=lambda a: a.n)
    found: dict[str, dict[str, Any]] = {}
    for i, arm in enumerate(own):
        found[arm.name] = {"color": colours(0.88 * i / max(len(own) - 1, 1)), "linestyle": "-"}
    for i, arm in enumerate(a for a in design.arms if a.rate_of):
        found[arm.name] = {"color": found[arm.rate_of]["color"], "linestyle": _DASHES[i % len(_DASHES)]}
    return found


def curves(
    design: Design, results: Results, prompt_set: str, phase: Phase = "test", figure: str = "pass_at_1"
) -> Figure:
    """A row per bin, a column per axis; `figure.axes` go row by row."""
    bins = [b.name for b in design.prompts.bins if any(r["bin"] == b.name for r in results.runs(phase).values())]
    drawn = Figure(figsize=(11, 0.9 + 3.3 * len(bins)), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    panels = drawn.subplots(len(bins), 2, squeeze=False)
    name = "pass@1" if figure == "pass_at_1" else f"pass@{design.evaluation.k}"
    shown: tuple[Axis, Axis] = ("seconds", "rollouts")
    for of, row in zip(bins, panels, strict=True):
        for axes, over in zip(row, shown, strict=True):
            _draw(axes, design, results, of, prompt_set, over, phase, figure)
            panel(axes, f"{of} prompts, {prompt_set}", name, _AXES[over][0])
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    handles: dict[str, Any] = {}
    for axes in drawn.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    drawn.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=5, frameon=False)
    return drawn


def _draw(
    axes: Axes, design: Design, results: Results, of: str, prompt_set: str, over: Axis, phase: Phase, figure: str
) -> None:
    unit, styles = _AXES[over][1], looks(design)
    for arm in design.arms:
        names = [n for n, r in results.runs(phase).items() if (r["arm"], r["bin"]) == (arm.name, of) and not r["error"]]
        lines = [curve(results.of(name, prompt_set), over, figure) for name in names]
        for line in lines:
            axes.plot([x / unit for x, _ in line], [y for _, y in line], alpha=0.5, linewidth=0.9, **styles[arm.name])
        if lines:
            mean = mean_curve(lines)
            axes.plot(
                [x / unit for x, _ in mean], [y for _, y in mean], linewidth=2, label=arm.name, **styles[arm.name]
            )


def mean_curve(lines: Sequence[Curve], places: int = 60) -> Curve:
    """Over runs, as far as the shortest of them goes."""
    start, end = lines[0][0][0], min(line[-1][0] for line in lines)
    grid = [start + (end - start) * i / (places - 1) for i in range(places - 1)] + [end]
    return [(x, sum(height(line, x) for line in lines) / len(lines)) for x in grid]


def differences(tests: Mapping[str, tuple[Sequence[float], PairedT | None]]) -> Figure:
    """By comparison: the difference of every warm start, their mean and its interval."""
    drawn = Figure(figsize=(10, 1.2 + 0.42 * len(tests)), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    axes = drawn.subplots()
    for place, (values, test) in enumerate(tests.values()):
        axes.plot(values, [place] * len(values), "o", color=GREY, markersize=4, alpha=0.8)
        if test:
            error = [[test.mean - test.low], [test.high - test.mean]]
            axes.errorbar(test.mean, place, xerr=error, fmt="D", color=BLUE, capsize=4)
    panel(axes, "Paired differences by warm start, mean and 95% interval", "", "after - before")
    axes.axvline(0, color=GREY, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(tests)), list(tests), fontsize=9)
    axes.set_ylim(len(tests) - 0.5, -0.5)  # the first on top
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    return drawn
