"""What `brorl evaluate` found, as a table and as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, PercentFormatter

from megatron_brorl.report.style import BLUE, GREEN, ORANGE, PURPLE, RED, SKY, panel, save

COLORS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)


def markdown(result: dict[str, Any]) -> str:
    """One row per benchmark, with the mean over benchmarks where there are several, and one per task beneath."""
    # Columns: pass@1 with its interval, then every other k.
    parts = result["benchmarks"]
    ks = list(result["pass_at_k"])  # 1 among them, which has its own column
    head = ["benchmark", "verifier", "prompts", "samples", "pass@1 (95% interval)", "mean reward (95% interval)"]
    rows = [[*head, *(f"pass@{k}" for k in ks if k != "1"), "response tokens"]]

    # A benchmark that lacks one of the k gets a dash there.
    for name, part in parts.items():
        counts = [", ".join(part["verifiers"]), str(part["prompts"]), str(part["samples"])]
        intervals = _intervals(part)
        rest = [_percent(part["pass_at_k"].get(k)) for k in ks if k != "1"]
        rows.append([name, *counts, *intervals, *rest, f"{part['response_tokens']:.1f}"])

    # The mean counts every benchmark alike, whatever its size.
    if len(parts) > 1:
        means = [_percent(_mean([x["pass_at_k"].get(k) for x in parts.values()])) for k in ks if k != "1"]
        intervals = _intervals(result["mean_of_benchmarks"])
        tokens = f"{sum(x['response_tokens'] for x in parts.values()) / len(parts):.1f}"
        counts = ["", str(result["prompts"]), str(result["samples"])]
        rows.append(["mean of benchmarks", *counts, *intervals, *means, tokens])

    tasks = [[name, f"{value:.2%}"] for name, value in result["by_task"].items()]  # over all benchmarks
    return table(rows) + "\n" + table([["task", "pass@1"], *tasks])


def table(rows: list[list[str]]) -> str:
    """A Markdown table; the first row is its head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


def plot_benchmarks(result: dict[str, Any], path: Path) -> Path:
    """Write the figure and return its path."""
    return save(build_figure(result), path)


def build_figure(result: dict[str, Any]) -> Figure:
    """pass@1 with its interval per benchmark, pass@k over k, and response tokens, in `figure.axes` in this order."""
    parts = result["benchmarks"]
    figure = Figure(figsize=(13.5, 4.2), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    score, curve, tokens = figure.subplots(1, 3)
    # Bars stand at 0, 1, ...; the names come below them.
    places = list(range(len(parts)))

    # How good, how much better with more tries, and at what length.
    panel(score, "Accuracy", "pass@1 and 95% interval", "benchmark")
    panel(curve, "At least one of k right", "pass@k", "k")
    panel(tokens, "Response length", "mean length (tokens)", "benchmark")

    # A colour per benchmark, the same in all three.
    for place, (name, part) in enumerate(parts.items()):
        p, color = part["pass_at_1"], COLORS[place % len(COLORS)]
        # Distances below and above the mean.
        error = [[max(p["mean"] - p["low"], 0.0)], [max(p["high"] - p["mean"], 0.0)]]
        score.bar(place, p["mean"], color=color, yerr=error, capsize=4)
        tokens.bar(place, part["response_tokens"], color=color)
        ks = [int(k) for k in part["pass_at_k"]]  # powers of two as a rule
        curve.plot(ks, list(part["pass_at_k"].values()), color=color, marker="o", label=name)

    # Axes: names below bars, shares as percentages.
    for axes in (score, tokens):
        axes.xaxis.set_major_locator(FixedLocator(places))
        axes.set_xticklabels(list(parts), rotation=20, ha="right")
    for axes in (score, curve):
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))

    curve.set_xscale("log", base=2)  # doublings of k at equal distances
    curve.legend(frameon=False, fontsize=9)
    return figure


def _intervals(part: dict[str, Any]) -> list[str]:
    """pass@1 as percentages, and the mean reward, which may be any number; both over prompts."""
    p, r = part["pass_at_1"], part["mean_reward"]
    return [
        f"{p['mean']:.2%} ({p['low']:.2%} to {p['high']:.2%})",
        f"{r['mean']:.4g} ({r['low']:.4g} to {r['high']:.4g})",
    ]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if len(known) == len(values) else None
