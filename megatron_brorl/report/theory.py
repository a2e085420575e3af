"""The figure of a run's live mass balance: the mass that was not sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from megatron_brorl.metrics import METRICS_FILE, read_metrics
from megatron_brorl.report.style import BLUE, ORANGE, panel, save, say

Row = dict[str, Any]


def plot_theory(run_dir: Path) -> Path | None:
    """Draw run_dir/theory.png and return its path; None for a run without diagnostics."""
    rows = [row for row in read_metrics(run_dir / METRICS_FILE) if any(k.startswith("theory_") for k in row)]
    return save(build_figure(rows), run_dir / "theory.png") if rows else None


def build_figure(rows: list[Row]) -> Figure:
    """Draw the unsampled mass over steps and the last hold-out curve. Missing or null values leave gaps."""
    figure = Figure(figsize=(10, 4.3), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    mass, curve = figure.subplots(1, 2)
    steps = np.array([row["step"] for row in rows])

    panel(mass, "Not sampled", "probability mass")
    low, middle, high = (_column(rows, f"theory_good_turing/{k}") for k in ("low", "unseen_mass", "high"))

    if np.isfinite(middle).any():
        mass.fill_between(steps, low, high, color=BLUE, alpha=0.2, linewidth=0)
        mass.plot(steps, middle, color=BLUE, label="answers (Good-Turing, 95%)")
        mass.plot(steps, _column(rows, "theory_exact/unsampled_mass"), color=ORANGE, label="next tokens (exact)")
        mass.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        mass.set_ylim(bottom=0)
        mass.legend(frameon=False, fontsize=9)
    else:
        say(mass, "no group with answers")

    panel(curve, "Answers of held-out siblings", "share that the others lack", "siblings held out")
    _hold_out(curve, rows)

    return figure


def _hold_out(axes: Axes, rows: list[Row]) -> None:
    """The curve of the last step that has one, with 95% intervals."""
    prefix = "theory_hold_out/unsampled_mass_"
    for row in reversed(rows):  # steps without groups have none
        # Numbers of siblings that were held out.
        of_row = [k.removeprefix(prefix) for k in row if k.startswith(prefix)]
        held = sorted(int(name) for name in of_row if name.isdigit())  # not the ends of intervals
        if held:
            # Masses and their intervals, in the order of `held`.
            ends = ("", "_low", "_high")
            values, low, high = (np.concatenate([_column([row], f"{prefix}{h}{e}") for h in held]) for e in ends)

            bars = np.maximum([values - low, high - values], 0.0)  # rounding may put an end inside
            axes.errorbar(held, values, yerr=bars, fmt="o-", color=BLUE, markersize=4, capsize=3)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_locator(FixedLocator(held))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xticklabels([str(h) for h in held])
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
            axes.set_ylim(bottom=0)
            return
    say(axes, "not recorded")


def _column(rows: list[Row], key: str) -> npt.NDArray[np.float64]:
    """One value per row; nan where it is missing or null."""
    return np.array([np.nan if row.get(key) is None else row[key] for row in rows], dtype=np.float64)
