"""The figure of `brorl simulate`: the three curves of BroRL's Fig. 3, and the terms of Theorem 1 below them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import PercentFormatter, ScalarFormatter

from megatron_brorl.report.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, panel, save
from megatron_brorl.theory.simulator import MOVED, PREDICTED, Curves, Settings

_COLORS = (RED, ORANGE, GREEN, SKY, BLUE, PURPLE)
_PARTS = {"drawn, right": GREEN, "drawn, wrong": SKY, "not drawn": RED, "weight decay": GREY}

Runs = dict[int, list[Curves]]  # N -> its seeds


def plot_simulation(curves: Sequence[Curves], settings: Settings, path: Path) -> Path:
    """Write the figure and return its path."""
    return save(build_figure(curves, settings), path)


def build_figure(curves: Sequence[Curves], settings: Settings) -> Figure:
    """Return a figure of six panels, in reading order in `figure.axes`."""
    runs: Runs = {}
    for c in curves:
        runs.setdefault(c.n, []).append(c)
    runs = dict(sorted(runs.items()))

    figure = Figure(figsize=(13.5, 7.8), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    seeds = len(next(iter(runs.values())))
    rule = f"AdamW, lr {settings.lr:g}, eps {settings.eps:g}, weight decay {settings.weight_decay:g}"
    if settings.optimizer == "sgd":
        rule = f"plain gradient steps, lr {settings.lr:g}, weight decay {settings.weight_decay:g}"
    figure.suptitle(
        f"{settings.vocabulary:,} tokens, {settings.correct:,} correct   ·   {rule}   ·   "
        f"{seeds} seed{'' if seeds == 1 else 's'}",
        fontsize=13,
    )

    (mass, improved, drop), (moved, predicted, signs) = figure.subplots(2, 3)

    # The upper row has the three curves of Fig. 3.
    panel(mass, "Mass of the correct tokens", "$Q_{pos}$", "step")
    _seeds(mass, runs, "q_pos")
    panel(improved, "Correct tokens above their start", "share", "step")
    _seeds(improved, runs, "improved_share")
    improved.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    improved.set_ylim(-0.03, 1.03)
    panel(drop, "Worst change of a correct token", "change of p since the start", "step")
    _seeds(drop, runs, "worst_drop")

    format_ = ScalarFormatter(useMathText=True)
    format_.set_powerlimits((-3, 3))
    drop.yaxis.set_major_formatter(format_)
    drop.legend(frameon=False, fontsize=9, title="N (draws per step)", title_fontsize=9, loc="best")

    # The lower row splits the change of Q_pos.
    title = (
        "What moved it: AdamW's steps, split" if settings.optimizer == "adamw" else "What moved it: the steps, split"
    )
    panel(moved, title, "change of $Q_{pos}$ over the run", "N")
    _parts(moved, runs, MOVED, with_measured=True)

    panel(predicted, "What Theorem 1 predicts: plain gradient", "change of $Q_{pos}$ over the run", "N")
    _parts(predicted, runs, PREDICTED, with_measured=False)
    panel(signs, "Steps that raise the mass", "share of steps", "N")
    _signs(signs, runs)
    return figure


def _seeds(axes: Axes, runs: Runs, name: str) -> None:
    """Draw one line per seed, in the colour of its N."""
    for color, (n, curves) in zip(_cycle(len(runs)), runs.items(), strict=True):
        for i, c in enumerate(curves):
            label = f"{n:,}" if i == 0 else None
            axes.plot(c.column("step"), c.column(name), color=color, linewidth=1.4, alpha=0.85, label=label)
    if name == "q_pos":
        axes.axhline(next(iter(runs.values()))[0].column(name)[0], color=GREY, linewidth=0.9, linestyle=":")


def _parts(axes: Axes, runs: Runs, names: tuple[str, ...], with_measured: bool) -> None:
    """Draw the sum of each part over the run as a bar, averaged over seeds."""
    width = 0.8 / len(names)
    at = np.arange(len(runs))
    for i, (name, (label, color)) in enumerate(zip(names, list(_PARTS.items())[: len(names)], strict=True)):
        heights = [_total(curves, name) for curves in runs.values()]
        axes.bar(at + (i - (len(names) - 1) / 2) * width, heights, width, color=color, label=label)

    if with_measured:
        measured = [_total(curves, "measured") for curves in runs.values()]
        axes.plot(at, measured, "D", color="black", markersize=6, label="measured")

    axes.axhline(0, color="black", linewidth=0.8)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.3 * (high - low))  # leaves room for the legend
    _category(axes, runs)
    axes.legend(
        frameon=False, fontsize=9, ncols=3, loc="upper center", columnspacing=0.7, handlelength=1.0, handletextpad=0.4
    )


def _signs(axes: Axes, runs: Runs) -> None:
    at = np.arange(len(runs))
    rows = {
        "predicted (plain gradient)": (BLUE, [_rising(c, PREDICTED) for c in runs.values()]),
        "measured": ("black", [_rising(c, ("measured",)) for c in runs.values()]),
    }
    for i, (label, (color, heights)) in enumerate(rows.items()):
        axes.bar(at + (i - 0.5) * 0.38, heights, 0.38, color=color, label=label)
    axes.set_ylim(0, 1.22)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _category(axes, runs)
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper center")


def _total(curves: list[Curves], name: str) -> float:
    return float(np.mean([c.column(name).sum() for c in curves]))


def _rising(curves: list[Curves], names: tuple[str, ...]) -> float:
    return float(np.mean([sum(c.column(name)[1:] for name in names) > 0 for c in curves]))


def _category(axes: Axes, runs: Runs) -> None:
    axes.set_xticks(np.arange(len(runs)), [f"{n:,}" for n in runs])


def _cycle(count: int) -> list[str]:
    return [_COLORS[i % len(_COLORS)] for i in range(count)]
