"""The figure of a run: six panels from metrics.jsonl and, once the run has ended, summary.json.

The axis has the step numbers of metrics.jsonl, from 0. An evaluation is drawn at the number of steps done before it,
which is the number of the step that samples with the same weights: a row's own evaluation was made after its update,
"before" is at 0, "after" at summary["steps"]. No pyplot: nothing here is global.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import PercentFormatter

from megatron_brorl.algo.estimators import widest
from megatron_brorl.json_files import read_object
from megatron_brorl.metrics import METRICS_FILE, read_metrics
from megatron_brorl.report.style import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, panel, save, say

PHASES = {"generate": BLUE, "score": ORANGE, "train": GREEN, "refit": PURPLE}
_FEW = 40  # up to here every step gets a marker; above, a running mean

Row = dict[str, Any]


def plot_run(run_dir: Path) -> Path:
    """Draw run_dir/curves.png and return its path."""
    run_dir = Path(run_dir)
    rows = read_metrics(run_dir / METRICS_FILE)
    figure = build_figure(rows, _read_summary(run_dir / "summary.json"))
    return save(figure, run_dir / "curves.png")


def build_figure(rows: list[Row], summary: dict[str, Any]) -> Figure:
    """The six panels, in reading order in `figure.axes`. Missing or null values leave gaps."""
    figure = Figure(figsize=(13.5, 7.6), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    figure.suptitle(_title(rows, summary), fontsize=13)
    (reward, accuracy, length), (kept, seconds, health) = figure.subplots(2, 3)
    # Numbered as in metrics.jsonl, so that a point can be looked up there and by brorl rollouts.
    steps = np.array([row["step"] for row in rows], dtype=np.int64)

    # What is trained for.
    panel(reward, "Training reward", "mean reward")
    _curve(reward, steps, _column(rows, "reward"), BLUE)

    panel(accuracy, "Held-out accuracy", "pass@1 and pass@k")
    _accuracy(accuracy, rows, summary)  # also before the first step and after the last

    panel(length, "Response length", "mean length (tokens)")
    _curve(length, steps, _column(rows, "response_tokens"), PURPLE)

    # What a step is made of.
    panel(kept, "Dynamic sampling", "prompts kept")
    _curve(kept, steps, _column(rows, "kept_share"), GREEN)
    kept.set_ylim(-0.03, 1.03)
    kept.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))

    panel(seconds, "Step time", "time per step (s)")
    _stack(seconds, steps, rows)  # phases on one another

    _health(health, steps, rows)  # or the gradient norm

    # One range of steps for all panels.
    last = max([*steps.tolist(), *_evaluations(rows, summary), 1])
    for axes in figure.axes:
        axes.set_xlim(-0.03 * last - 0.5, last * 1.03 + 0.5)
    return figure


def _read_summary(path: Path) -> dict[str, Any]:
    return read_object(path, "delete it to plot without it") if path.exists() else {}


def _title(rows: list[Row], summary: dict[str, Any]) -> str:
    steps = summary.get("steps", rows[-1]["step"] + 1 if rows else 0)
    parts = [f"{steps} training step{'' if steps == 1 else 's'}"]
    if "rollouts_per_prompt" in summary:
        parts.insert(0, f"N = {summary['rollouts_per_prompt']} rollouts per prompt")

    before, after = summary.get("pass_at_1_before"), summary.get("pass_at_1_after")
    if before and after:
        change = f"held-out pass@1 {before['mean']:.1%} → {after['mean']:.1%}"
        k, wide = _wide([], summary)
        if len(wide) == 2:
            change += f", pass@{k} {wide[0]:.1%} → {wide[steps]:.1%}"
        if "held_out_prompts" in summary:
            change += f" ({summary['held_out_prompts']} prompts)"
        parts.append(change)

    if "job_seconds" in summary:
        minutes = summary["job_seconds"] / 60
        parts.append(f"{minutes / 60:.1f} h" if minutes >= 120 else f"{minutes:.1f} min")
    return "   ·   ".join(parts)


def _column(rows: list[Row], key: str) -> np.ndarray:
    """One value per row; NaN where it is missing or null."""
    return np.array([np.nan if row.get(key) is None else row[key] for row in rows], dtype=np.float64)


def _curve(axes: Axes, steps: np.ndarray, values: np.ndarray, color: str, smooth: bool = True) -> None:
    """The values as they are, and their running mean where there are many."""
    known = np.isfinite(values)  # gaps stay gaps
    if not known.any():
        say(axes, "not recorded")
        return
    few = len(values) <= _FEW
    faint = smooth and not few  # behind the running mean
    # A point between two gaps has no line to either side: without a marker it would not show.
    padded = np.concatenate([[False], known, [False]])
    marked = known if few else known & ~padded[:-2] & ~padded[2:]

    # NaN breaks the line: a gap shows as a gap.
    axes.plot(
        steps,
        values,
        color=color,
        linewidth=0.8 if faint else 1.6,
        alpha=0.4 if faint else 1.0,
        marker="o",
        markersize=3.5,
        markevery=np.flatnonzero(marked).tolist(),
    )

    # The window grows with the run: the mean stays as smooth in a long one.
    if faint:
        half = max(2, len(values) // 40)  # of the window, a twentieth of the run
        means = [_mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
        axes.plot(steps, means, color=color, linewidth=2.0, label=f"mean of {2 * half + 1} steps")
        axes.legend(frameon=False, fontsize=9)


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else float("nan")


def _evaluations(rows: list[Row], summary: dict[str, Any]) -> dict[int, tuple[float, float, float]]:
    """Steps done -> (mean, low, high) of pass@1; before and after come from the summary."""
    found: dict[int, tuple[float, float, float]] = {}
    # During the run, in its rows; before and after, in its summary.
    for row in rows:
        mean = row.get("pass_at_1")
        if mean is not None:
            low, high = row.get("pass_at_1_low"), row.get("pass_at_1_high")
            found[row["step"] + 1] = (mean, mean if low is None else low, mean if high is None else high)
    ends = {"pass_at_1_before": 0, "pass_at_1_after": summary.get("steps", rows[-1]["step"] + 1 if rows else 0)}
    for key, step in ends.items():
        if summary.get(key):
            found[step] = (summary[key]["mean"], summary[key]["low"], summary[key]["high"])
    return dict(sorted(found.items()))


def _wide(rows: list[Row], summary: dict[str, Any]) -> tuple[int, dict[int, float]]:
    """The largest k that was evaluated, and steps done -> pass@k, as in _evaluations."""
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        passes = {key.removeprefix("pass_at_"): value for key, value in row.items() if key.startswith("pass_at_")}
        found[row["step"] + 1] = {k: v for k, v in passes.items() if k.isdigit() and v is not None}
    for name, step in {"before": 0, "after": summary.get("steps", rows[-1]["step"] + 1 if rows else 0)}.items():
        if summary.get(name):
            found[step] = summary[name]["pass_at_k"]

    k = max((most[0] for passes in found.values() if (most := widest(passes))), default=1)
    return k, {step: passes[str(k)] for step, passes in sorted(found.items()) if k > 1 and str(k) in passes}


def _accuracy(axes: Axes, rows: list[Row], summary: dict[str, Any]) -> None:
    # Steps done -> pass@1 with its interval; empty until the first evaluation.
    found = _evaluations(rows, summary)
    if not found:
        say(axes, "no evaluation yet")
        return

    # One line through all of them: before, during and after the run.
    mean, low, high = np.array(list(found.values()), dtype=np.float64).T
    axes.errorbar(
        list(found),
        mean,
        yerr=np.maximum([mean - low, high - mean], 0.0),  # rounding may put an end inside
        color=RED,
        marker="o",
        markersize=5,
        linewidth=1.6,
        elinewidth=1.4,
        capsize=4,
        label="pass@1 and 95% interval",
    )

    # pass@k of the largest k beside it.
    k, wide = _wide(rows, summary)
    if wide:  # where more than one sample was drawn per prompt
        axes.plot(
            list(wide), list(wide.values()), color=SKY, marker="s", markersize=4, linewidth=1.4, label=f"pass@{k}"
        )

    axes.set_ylim(bottom=0)  # accuracies from 0, for gaps look larger otherwise
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.legend(frameon=False, fontsize=9)


def _stack(axes: Axes, steps: np.ndarray, rows: list[Row]) -> None:
    """One band per phase; what no phase accounts for is "other"."""
    times = [row.get("time") or {} for row in rows]
    if not any(times):
        say(axes, "not recorded")
        return

    # The time of every step, with gaps where steps are missing.
    first = int(steps.min())
    base = np.zeros(int(steps.max()) - first + 1)
    edges = np.arange(first, first + len(base) + 1) - 0.5
    whole = base.copy()  # height of each step's column
    whole[steps - first] = np.nan_to_num(_column(times, "step"))

    # Bands from below; thin ones are left out.
    for phase, color in {**PHASES, "other": GREY}.items():
        height = np.maximum(whole - base, 0)
        if phase != "other":
            height[:] = 0
            height[steps - first] = np.nan_to_num(_column(times, phase))
        if height.max() > 0.005 * whole.max():  # thinner bands would not show
            axes.stairs(base + height, edges, baseline=base, fill=True, color=color, label=phase)
        base = base + height  # the next band stands on this one

    axes.margins(y=0)
    axes.set_ylim(0, 1.25 * base.max() if base.max() > 0 else 1)  # room for the legend
    axes.legend(
        frameon=False, fontsize=9, ncols=5, loc="upper center", columnspacing=0.9, handlelength=0.9, handletextpad=0.4
    )


def _health(axes: Axes, steps: np.ndarray, rows: list[Row]) -> None:
    """How far engine and trainer disagree; the gradient norm in a run that did not record it."""
    gap = _column(rows, "logprob_gap_max")
    if not np.isfinite(gap).any():
        panel(axes, "Gradient norm", "norm before clipping")
        _curve(axes, steps, _column(rows, "grad_norm"), SKY)
        return
    panel(axes, "Engine against trainer", "largest log-prob gap (nats)")
    if not np.nanmax(gap) > 0:
        say(axes, "exactly 0 at every step")
        return
    axes.set_yscale("log")
    _curve(axes, steps, np.where(gap > 0, gap, np.nan), SKY, smooth=False)  # a log scale has no 0
