"""PNG figures of a run (curves.png), of `brorl pass-rates` and `brorl simulate`, and their shared parts.

Steps count from 1, one more than in metrics.jsonl. An evaluation is drawn at the number of steps done before it.
pyplot is not used: no state is global.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter, ScalarFormatter

from megatron_brorl.algo.pass_at_k import SIZES
from megatron_brorl.errors import UserError
from megatron_brorl.files import writing
from megatron_brorl.report.content import RecordedEvaluation, evaluations, read_run
from megatron_brorl.rollout_log import FOLDER, entries, one_line, read_groups
from megatron_brorl.theory.simulator import MOVED, PREDICTED, Curves, Settings

# The palette of Okabe and Ito, which is safe for colour-blind readers.
BLUE, ORANGE, GREEN, RED, SKY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
GREY = "#8C8C8C"
PHASES = {"generate": BLUE, "score": ORANGE, "train": GREEN, "weight_sync": PURPLE}
_ENDS = ("low", "high")
_TASK_COLORS = (GREEN, ORANGE, PURPLE, BLUE)
_COLORS = (RED, ORANGE, GREEN, SKY, BLUE, PURPLE)
_PARTS = {"drawn, right": GREEN, "drawn, wrong": SKY, "not drawn": RED, "weight decay": GREY}
_MAX_MARKERS = 40  # Longer curves have a running mean instead of markers.

Floats = npt.NDArray[np.float64]
Row = Mapping[str, Any]
_Runs = dict[int, list[Curves]]  # N -> curves of its seeds


def figure_of(rows: int, columns: int, width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    return figure, figure.subplots(rows, columns)


def panel(axes: Axes, title: str, ylabel: str, xlabel: str = "training step") -> None:
    """Set title and labels, and draw a light grid."""
    axes.set_title(title, fontsize=11, loc="left", fontweight="bold")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def draw_text(axes: Axes, text: str) -> None:
    """Write a text into empty axes."""
    axes.set_yticks([])
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY)


def save(figure: Figure, path: Path) -> Path:
    """Write a PNG atomically."""
    with writing(path) as aside:
        FigureCanvasAgg(figure).print_figure(aside, dpi=110, format="png", pil_kwargs={"optimize": True})
    return path


def plot_run(run_dir: Path) -> Path:
    """Draw run_dir/curves.png and return its path."""
    run = read_run(run_dir)
    return save(curves_figure(run.rows, run.summary, evaluations(run)), run_dir / "curves.png")


def curves_figure(rows: Sequence[Row], summary: Row, evaluated: Sequence[RecordedEvaluation]) -> Figure:
    """Draw six panels (`figure.axes` has them in reading order). Missing or null values leave gaps."""
    figure, ((reward, accuracy, length), (kept, seconds, health)) = figure_of(rows=2, columns=3, width=13.5, height=7.6)
    figure.suptitle(_title(rows, summary, evaluated), fontsize=13)
    steps = np.array([row["step"] + 1 for row in rows], dtype=np.int64)
    eval_steps = [e.steps for e in evaluated]
    graded = any(e.reward for e in evaluated)

    panel(reward, "Reward" if graded else "Training reward", "mean reward")
    _curve(reward, steps, column(rows, "reward"), BLUE)
    if graded:
        _intervals(reward, eval_steps, [e.reward or e.passes[1] for e in evaluated], "held-out and 95% interval")
        reward.legend(frameon=False, fontsize=9)
    panel(accuracy, "Held-out accuracy", "pass@1 and pass@k")
    _accuracy(accuracy, evaluated)
    panel(length, "Response length", "mean length (tokens)")
    _curve(length, steps, column(rows, "response_tokens"), PURPLE)

    panel(kept, "Dynamic sampling", "prompts kept")
    _curve(kept, steps, column(rows, "kept_share"), GREEN)
    kept.set_ylim(-0.03, 1.03)
    kept.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    panel(seconds, "Step time", "time per step (s)")
    _stack(seconds, steps, rows)
    _health(health, steps, rows)

    last = max([*steps.tolist(), *eval_steps, 1])
    for axes in figure.axes:
        axes.set_xlim(-0.03 * last - 0.5, last * 1.03 + 0.5)
    return figure


def column(rows: Sequence[Row], key: str) -> Floats:
    """Return one value per row; NaN where it is missing or null."""
    return np.array([np.nan if row.get(key) is None else row[key] for row in rows], dtype=np.float64)


def _title(rows: Sequence[Row], summary: Row, evaluated: Sequence[RecordedEvaluation]) -> str:
    steps = summary.get("steps", rows[-1]["step"] + 1 if rows else 0)
    parts = [f"{steps} training step{'' if steps == 1 else 's'}"]
    if "rollouts_per_prompt" in summary:
        parts.insert(0, f"N = {summary['rollouts_per_prompt']} rollouts per prompt")
    if summary and len(evaluated) > 1:
        first, last = evaluated[0].passes, evaluated[-1].passes
        largest_k = max(set(first) & set(last))
        ends = [f"pass@{k} {first[k]['mean']:.1%} → {last[k]['mean']:.1%}" for k in sorted({1, largest_k})]
        parts.append(f"held-out {', '.join(ends)} ({summary.get('held_out_prompts', '?')} prompts)")
    if "job_seconds" in summary:
        minutes = summary["job_seconds"] / 60
        parts.append(f"{minutes / 60:.1f} h" if minutes >= 120 else f"{minutes:.1f} min")
    return "   ·   ".join(parts)


def _curve(axes: Axes, steps: npt.NDArray[np.int64], values: Floats, color: str, smooth: bool = True) -> None:
    """Draw the values, and the running mean of a long curve."""
    known = np.isfinite(values)
    if not known.any():
        draw_text(axes, "not recorded")
        return
    few = len(values) <= _MAX_MARKERS
    faint = smooth and not few
    # A point between two gaps has no line segment, so it needs a marker to be visible.
    padded = np.concatenate([[False], known, [False]])
    marked = known if few else known & ~padded[:-2] & ~padded[2:]
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
    if faint:
        half = max(2, len(values) // 40)
        windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
        means = [float(np.nanmean(w)) if np.isfinite(w).any() else np.nan for w in windows]
        axes.plot(steps, means, color=color, linewidth=2.0, label=f"mean of {2 * half + 1} steps")
        axes.legend(frameon=False, fontsize=9)


def _intervals(axes: Axes, steps: list[int], points: Sequence[Mapping[str, float]], label: str) -> None:
    """Draw held-out means with their intervals."""
    # Rounding may put a bound on the wrong side of the mean.
    bars = [[abs(p.get(end, p["mean"]) - p["mean"]) for p in points] for end in _ENDS]
    axes.errorbar(steps, [p["mean"] for p in points], bars, color=RED, marker="o", capsize=4, label=label)


def _accuracy(axes: Axes, evaluated: Sequence[RecordedEvaluation]) -> None:
    """Draw pass@1 with its interval, pass@k of the largest k, and pass@1 of each task if there are a few tasks."""
    if not evaluated:
        draw_text(axes, "no evaluation yet")
        return
    _intervals(axes, [e.steps for e in evaluated], [e.passes[1] for e in evaluated], "pass@1 and 95% interval")
    k = max(k for e in evaluated for k in e.passes)
    if k > 1:
        steps, values = zip(*((e.steps, e.passes[k]["mean"]) for e in evaluated if k in e.passes), strict=True)
        axes.plot(steps, values, color=SKY, marker="s", markersize=4, linewidth=1.4, label=f"pass@{k}")
    tasks = sorted({task for e in evaluated for task in e.tasks})
    if 1 < len(tasks) <= len(_TASK_COLORS):
        for task, color in zip(tasks, _TASK_COLORS, strict=False):
            means = {e.steps: e.tasks[task]["mean"] for e in evaluated if task in e.tasks}
            label = one_line(f"pass@1, {task}").replace("$", r"\$")  # Matplotlib would read $ as a formula.
            axes.plot(list(means), list(means.values()), color=color, linestyle="--", linewidth=1, label=label)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.legend(frameon=False, fontsize=9)


def _stack(axes: Axes, steps: npt.NDArray[np.int64], rows: Sequence[Row]) -> None:
    """Draw one band per phase; the rest of the step is "other"."""
    times = [row.get("time") or {} for row in rows]
    if not any(times):
        draw_text(axes, "not recorded")
        return
    first = int(steps.min())
    base = np.zeros(int(steps.max()) - first + 1)
    edges = np.arange(first, first + len(base) + 1) - 0.5
    step_s = base.copy()
    step_s[steps - first] = np.nan_to_num(column(times, "step"))
    for phase, color in {**PHASES, "other": GREY}.items():
        height = np.maximum(step_s - base, 0)
        if phase != "other":
            height[:] = 0
            height[steps - first] = np.nan_to_num(column(times, phase))
        if height.max() > 0.005 * step_s.max():  # Thinner bands would not be visible.
            axes.stairs(base + height, edges, baseline=base, fill=True, color=color, label=phase)
        base = base + height
    axes.margins(y=0)
    axes.set_ylim(0, 1.25 * base.max() if base.max() > 0 else 1)  # room for the legend
    axes.legend(
        frameon=False, fontsize=8, ncols=5, loc="upper center", columnspacing=0.7, handlelength=0.8, handletextpad=0.3
    )


def _health(axes: Axes, steps: npt.NDArray[np.int64], rows: Sequence[Row]) -> None:
    """Draw the log-prob gap between engine and trainer, or the gradient norm if the gap is not recorded."""
    gap = column(rows, "logprob_gap_max")
    if not np.isfinite(gap).any():
        panel(axes, "Gradient norm", "norm before clipping")
        _curve(axes, steps, column(rows, "grad_norm"), SKY)
        return
    panel(axes, "Engine against trainer", "largest log-prob gap (nats)")
    if not np.nanmax(gap) > 0:
        draw_text(axes, "exactly 0 at every step")
        return
    axes.set_yscale("log")
    _curve(axes, steps, np.where(gap > 0, gap, np.nan), SKY, smooth=False)  # A log scale has no 0.


# `brorl pass-rates`


def latest_groups(run: Path) -> tuple[str, list[Row]]:
    """Return the kind of moment, and the last group of each prompt (rollout_log.GROUPS).

    Groups of training steps are read, or else those of evaluations. Raises UserError if nothing is recorded.
    """
    moments = entries(run / FOLDER)
    kind = "step" if any(m.kind == "step" for m in moments) else "evaluation"
    last: dict[str, Row] = {}
    for moment in (m for m in moments if m.kind == kind):
        groups = read_groups(run / FOLDER, moment).drop_columns(["prompt", "reference"]).to_pylist()
        last |= {g["prompt_id"]: g for g in groups if g["rollouts"]}
    if not last:
        raise UserError(f"{run / FOLDER}: no group with rollouts is recorded; record a run first (brorl train)")
    return kind, list(last.values())


def plot_pass_rates(rates: Floats, shares: list[float], path: Path) -> Path:
    """Draw the distribution of success rates [P], and the share of mixed groups for each N of SIZES."""
    figure, (left, right) = figure_of(rows=1, columns=2, width=10, height=4)
    panel(left, "Success rates of prompts", "prompts", "success rate")
    left.hist(rates, bins=np.linspace(0, 1, 21).tolist(), color=BLUE)
    left.set_xticks(np.linspace(0, 1, 6))
    panel(right, "Groups with different rewards", "share of prompts", "N (rollouts per prompt)")
    right.plot(SIZES, shares, "o-", color=BLUE)
    right.set_xscale("log", base=2)
    right.set_xticks(SIZES, [str(n) for n in SIZES])
    right.set_ylim(0, 1.03)
    right.yaxis.set_major_formatter(PercentFormatter(1.0))
    return save(figure, path)


# `brorl simulate`


def simulation_figure(curves: Sequence[Curves], settings: Settings) -> Figure:
    """Draw the three curves of BroRL's Fig. 3, and below them the terms of Theorem 1."""
    runs: _Runs = {}
    for curve in curves:
        runs.setdefault(curve.n, []).append(curve)
    runs = dict(sorted(runs.items()))

    figure, ((mass, improved, drop), (moved, predicted, signs)) = figure_of(rows=2, columns=3, width=13.5, height=7.8)
    seeds = len(next(iter(runs.values())))
    rule = f"AdamW, lr {settings.lr:g}, eps {settings.eps:g}, weight decay {settings.weight_decay:g}"
    if settings.optimizer == "sgd":
        rule = f"plain gradient steps, lr {settings.lr:g}, weight decay {settings.weight_decay:g}"
    figure.suptitle(
        f"{settings.vocabulary:,} tokens, {settings.correct:,} correct   ·   {rule}   ·   "
        f"{seeds} seed{'' if seeds == 1 else 's'}",
        fontsize=13,
    )

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

    steps_text = "AdamW's steps" if settings.optimizer == "adamw" else "the steps"
    panel(moved, f"What moved it: {steps_text}, split", "change of $Q_{pos}$ over the run", "N")
    _parts(moved, runs, MOVED, with_measured=True)

    panel(predicted, "What Theorem 1 predicts: plain gradient", "change of $Q_{pos}$ over the run", "N")
    _parts(predicted, runs, PREDICTED, with_measured=False)
    panel(signs, "Steps that raise the mass", "share of steps", "N")
    _signs(signs, runs)
    return figure


def _seeds(axes: Axes, runs: _Runs, name: str) -> None:
    """Draw one line per seed, in the colour of its N."""
    for color, (n, curves) in zip(cycle(_COLORS), runs.items(), strict=False):
        for i, c in enumerate(curves):
            label = f"{n:,}" if i == 0 else None
            axes.plot(c.column("step"), c.column(name), color=color, linewidth=1.4, alpha=0.85, label=label)
    if name == "q_pos":
        axes.axhline(next(iter(runs.values()))[0].column(name)[0], color=GREY, linewidth=0.9, linestyle=":")


def _parts(axes: Axes, runs: _Runs, names: tuple[str, ...], with_measured: bool) -> None:
    """Draw the sum of each part over the run as a bar, averaged over seeds."""
    width = 0.8 / len(names)
    places = np.arange(len(runs))
    for i, (name, (label, color)) in enumerate(zip(names, list(_PARTS.items())[: len(names)], strict=True)):
        heights = [_total(curves, name) for curves in runs.values()]
        axes.bar(places + (i - (len(names) - 1) / 2) * width, heights, width=width, color=color, label=label)

    if with_measured:
        measured = [_total(curves, "measured") for curves in runs.values()]
        axes.plot(places, measured, "D", color="black", markersize=6, label="measured")

    axes.axhline(0, color="black", linewidth=0.8)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.3 * (high - low))  # room for the legend
    _category(axes, runs)
    axes.legend(
        frameon=False, fontsize=9, ncols=3, loc="upper center", columnspacing=0.7, handlelength=1.0, handletextpad=0.4
    )


def _signs(axes: Axes, runs: _Runs) -> None:
    places = np.arange(len(runs))
    bars = {
        "predicted (plain gradient)": (BLUE, [_rising(c, PREDICTED) for c in runs.values()]),
        "measured": ("black", [_rising(c, ("measured",)) for c in runs.values()]),
    }
    for i, (label, (color, heights)) in enumerate(bars.items()):
        axes.bar(places + (i - 0.5) * 0.38, heights, width=0.38, color=color, label=label)
    axes.set_ylim(0, 1.22)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _category(axes, runs)
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper center")


def _total(curves: list[Curves], name: str) -> float:
    return float(np.mean([c.column(name).sum() for c in curves]))


def _rising(curves: list[Curves], names: tuple[str, ...]) -> float:
    return float(np.mean([sum(c.column(name)[1:] for name in names) > 0 for c in curves]))


def _category(axes: Axes, runs: _Runs) -> None:
    axes.set_xticks(np.arange(len(runs)), [f"{n:,}" for n in runs])
