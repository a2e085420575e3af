"""The results of tools/prorl_vs_brorl.py as tables and as one figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import PercentFormatter

from megatron_brorl.report.benchmarks import table
from megatron_brorl.report.style import BLUE, GREY, ORANGE, panel

COLORS = {"base": GREY, "prorl": ORANGE, "brorl": BLUE}


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def markdown(results: dict[str, Any]) -> str:
    """One row per arm and seed, one per task, and what the paired tests say."""
    rows = [["arm", "seed", "steps", "samples", "kept", "samples/s", "tokens", "pass@1 (95% interval)", "pass@k"]]
    rows.append(_row("base", "", results["base"]))
    for arm, seeds in results["arms"].items():
        rows += [_row(arm, seed, part) for seed, part in seeds.items()]
    tasks = tasks_of(results)
    by_task = [
        ["task", *next(iter(tasks.values()))],
        *([task, *map(_spread, arms.values())] for task, arms in tasks.items()),
    ]
    tests = [["difference", "", "mean (95% interval)", "t", "degrees of freedom", "one-tailed p"]]
    for name, parts in results["paired"].items():
        for over, test in parts.items():
            d = test["difference"]
            gap = f"{d['mean']:+.2%} ({d['low']:+.2%} to {d['high']:+.2%})"
            tests.append([name, over, gap, f"{test['t']:.2f}", str(test["degrees"]), f"{test['one_tailed']:.2g}"])
    steps = results["base"]["steps"]
    begin = f"a run with N = 16 of {steps} steps" if steps else "a model"
    head = (
        f"`{results['command']}`, {results['machine']}, {results['date']}: from {begin}, "
        f"{results['seconds_per_arm']:.0f} s of training per arm and seed."
    )
    return "\n".join([head, "", table(rows), table(by_task), table(tests)])


def _row(arm: str, seed: str, part: dict[str, Any]) -> list[str]:
    final = part["final"]
    p, (k, passed) = final["pass_at_1"], list(final["pass_at_k"].items())[-1]
    cells = [arm, seed, *[""] * 4]
    if part["steps"]:
        samples = f"{part['curve']['rows'][-1][1]:.0f}"
        cells[2:] = [str(part["steps"]), samples, f"{part['kept_share']:.1%}", f"{part['samples_per_s']:.0f}"]
    interval = f"{p['mean']:.2%} ({p['low']:.2%} to {p['high']:.2%})"
    return [*cells, f"{final['response_tokens']:.2f}", interval, f"{passed:.2%} (k = {k})"]


def tasks_of(results: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Final pass@1 of each task, of the base run and of each arm's seeds."""
    runs = {"base": [results["base"]], **{arm: list(seeds.values()) for arm, seeds in results["arms"].items()}}
    tasks = sorted(results["base"]["final"]["by_task"])
    return {task: {arm: [p["final"]["by_task"][task] for p in parts] for arm, parts in runs.items()} for task in tasks}


def _spread(values: list[float]) -> str:
    text = f"{mean(values):.2%}"
    return text if len(values) == 1 else f"{text} ({min(values):.2%} to {max(values):.2%})"


def whiskers(values: list[float]) -> tuple[float, float]:
    """How far the least and the greatest are from the mean; a mean of equal values may be off by its rounding."""
    return max(mean(values) - min(values), 0.0), max(max(values) - mean(values), 0.0)


def build_figure(results: dict[str, Any]) -> Figure:
    """pass@1 over seconds and samples, pass@k, kept share, tasks and differences, in `figure.axes` in this order."""
    figure = Figure(figsize=(15, 8.2), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    first, samples, kth, kept, tasks, gaps = figure.subplots(2, 3).flat
    runs = [part for seeds in results["arms"].values() for part in seeds.values()]
    k = runs[0]["curve"]["columns"][3].replace("pass_at_", "pass@")
    clock = "training seconds"
    panel(first, "Accuracy over time", "pass@1", clock)
    panel(samples, "Accuracy over samples", "pass@1", "rollouts (thousands)")
    panel(kth, f"{k} over time", k, clock)
    panel(kept, "Dynamic sampling", "share of prompts kept", clock)
    panel(tasks, "Final accuracy by task", "pass@1, mean and range of seeds", "task")
    panel(gaps, "Final accuracy, brorl - prorl", "difference of pass@1, 95% interval", "paired over")
    for arm, seeds in results["arms"].items():
        n = results["settings"][arm]["rollout.n"]
        for i, part in enumerate(seeds.values()):
            rows, label = part["curve"]["rows"], f"{arm}, N = {n} (one line per seed)" if i == 0 else None
            for axes, x, y, unit in ((first, 0, 2, 1), (samples, 1, 2, 1e3), (kth, 0, 3, 1), (kept, 0, 6, 1)):
                shown = [r for r in rows if r[y] is not None]
                axes.plot(
                    [r[x] / unit for r in shown],
                    [r[y] for r in shown],
                    color=COLORS[arm],
                    marker="o",
                    markersize=3,
                    label=label,
                )
    start = results["base"]["final"]["pass_at_1"]["mean"]
    for axes in (first, samples):
        axes.axhline(start, color=GREY, linestyle="--", linewidth=1, label="where both begin")
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    kept.set_ylim(0, 1)
    _draw_tasks(tasks, tasks_of(results))
    _draw_gaps(gaps, results["paired"]["brorl - prorl"])
    for axes in figure.axes:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    return figure


def _draw_tasks(axes: Axes, tasks: dict[str, dict[str, list[float]]]) -> None:
    arms = list(next(iter(tasks.values())))
    for j, arm in enumerate(arms):
        places = [i + 0.26 * (j - 1) for i in range(len(tasks))]
        values = [tasks[task][arm] for task in tasks]
        error = list(zip(*map(whiskers, values), strict=True))
        axes.bar(places, [mean(v) for v in values], 0.24, color=COLORS[arm], yerr=error, capsize=3, label=arm)
    axes.set_xticks(range(len(tasks)), list(tasks), rotation=15)
    axes.legend(frameon=False, fontsize=9)


def _draw_gaps(axes: Axes, tests: dict[str, Any]) -> None:
    for i, test in enumerate(tests.values()):
        d = test["difference"]
        error = [[max(d["mean"] - d["low"], 0.0)], [max(d["high"] - d["mean"], 0.0)]]
        axes.errorbar(i, d["mean"], yerr=error, color=BLUE, marker="o", capsize=4)
    axes.axhline(0, color=GREY, linestyle="--", linewidth=1)
    axes.set_xticks(range(len(tests)), [name.removeprefix("over ").replace(", over", ",\n") for name in tests])
