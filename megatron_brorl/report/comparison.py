"""Tables and figures of `brorl evaluate`, and of `brorl compare`, which compares two evaluations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, PercentFormatter

from megatron_brorl.algo.pass_at_k import pass_at_k, widest
from megatron_brorl.algo.statistics import SHARE, SHARES, bootstrap_mean, paired
from megatron_brorl.errors import UserError, shown
from megatron_brorl.report.findings import reward_change
from megatron_brorl.report.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, figure_of, panel

COLORS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)
Key = tuple[str, str]  # benchmark, id of the prompt
_RESAMPLES = 10_000  # of the bootstrap
# test: key of the paired test in a comparison. bounds, gap_bounds: of a value, and of a difference of two values.
_METRICS: dict[str, dict[str, Any]] = {
    "pass_at_1": {"label": "pass@1", "test": "paired", "form": ".2%", "bounds": SHARE, "gap_bounds": SHARES},
    "mean_reward": {"label": "mean reward", "test": "paired_reward", "form": ".4g", "bounds": None, "gap_bounds": None},
}
_KEYS = ("samples", "right", "tokens")  # required in every line of an evaluation.jsonl


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table. The first row is its header."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


def evaluation_markdown(result: Mapping[str, Any]) -> str:
    """Return tables of benchmarks, with their mean if there are several, and of tasks."""
    parts = result["benchmarks"]
    ks = [k for k in result["pass_at_k"] if k != "1"]
    head = ["benchmark", "verifier", "prompts", "samples", "pass@1 (95% interval)", "mean reward (95% interval)"]
    rows = [[*head, *(f"pass@{k}" for k in ks), "response tokens"]]
    for name, part in parts.items():
        counts = [", ".join(part["verifiers"]), str(part["prompts"]), str(part["samples"])]
        pass_at_ks = [_percent(part["pass_at_k"].get(k)) for k in ks]
        rows.append([name, *counts, *_intervals(part), *pass_at_ks, f"{part['response_tokens']:.1f}"])
    if len(parts) > 1:
        # The mean gives every benchmark the same weight, regardless of its number of prompts.
        pass_at_ks = [_percent(_mean([x["pass_at_k"].get(k) for x in parts.values()])) for k in ks]
        tokens = _mean([x["response_tokens"] for x in parts.values()])
        counts = ["", str(result["prompts"]), str(result["samples"])]
        means = _intervals(result["mean_of_benchmarks"])
        rows.append(["mean of benchmarks", *counts, *means, *pass_at_ks, f"{tokens:.1f}"])
    tasks = [[name, _accuracy(p)] for name, p in result["by_task"].items()]
    return table(rows) + "\n" + table([["task", "pass@1 (95% interval)"], *tasks])


def evaluation_figure(result: Mapping[str, Any]) -> Figure:
    """Draw pass@1 with its interval, pass@k over k, and response tokens of each benchmark."""
    parts = result["benchmarks"]
    figure, (score, curve, tokens) = figure_of(rows=1, columns=3, width=13.5, height=4.2)
    panel(score, "Accuracy", "pass@1 and 95% interval", "benchmark")
    panel(curve, "At least one of k right", "pass@k", "k")
    panel(tokens, "Response length", "mean length (tokens)", "benchmark")
    for place, (name, part) in enumerate(parts.items()):
        accuracy = part["pass_at_1"]
        color = COLORS[place % len(COLORS)]
        score.bar(place, accuracy["mean"], color=color, yerr=_error(accuracy), capsize=4)
        tokens.bar(place, part["response_tokens"], color=color)
        ks = [int(k) for k in part["pass_at_k"]]
        curve.plot(ks, list(part["pass_at_k"].values()), color=color, marker="o", label=name)
    for axes in (score, tokens):
        _name_places(axes, list(parts))
    for axes in (score, curve):
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    curve.set_xscale("log", base=2)
    curve.legend(frameon=False, fontsize=9)
    return figure


def read_answers(path: Path) -> dict[Key, dict[str, Any]]:
    """Return the lines of an evaluation.jsonl by prompt. Raises UserError if it is not such a file."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        answers = {(row["benchmark"], row["id"]): row | {key: row[key] for key in _KEYS} for row in rows}
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give the run.dir of a `brorl evaluate`") from None
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise UserError(f"{path}: not written by `brorl evaluate` ({shown(e)}); evaluate again") from None
    if not answers:
        raise UserError(f"{path}: contains no prompts; evaluate again")
    return answers


def compare(
    before: Mapping[Key, Mapping[str, Any]], after: Mapping[Key, Mapping[str, Any]], name: str, other: str
) -> dict[str, Any]:
    """Compare two evaluations, over all prompts and per benchmark. Raises UserError unless the prompts are the same.

    name, other: names of the two evaluations. Mean rewards are included if they differ from pass@1.
    """
    unpaired = sorted(before.keys() ^ after.keys())
    if unpaired:
        benchmark, prompt = unpaired[0]
        where = name if unpaired[0] in before else other
        raise UserError(
            f"{name} and {other}: {len(unpaired)} prompts are only in one of them, for example {prompt!r} of "
            f"{benchmark} in {where}; evaluate both on the same files"
        )
    keys = sorted(before)  # The order makes the bootstrap independent of the order of lines.
    if len(keys) < 2:
        raise UserError(f"{name}: a comparison needs at least 2 prompts")
    names = sorted({benchmark for benchmark, _ in keys})
    groups = {n: [k for k in keys if k[0] == n] for n in names}
    rows = [*before.values(), *after.values()]
    max_k = min(row["samples"] for row in rows)
    differs = any(abs(_score(row, "mean_reward") - _score(row, "pass_at_1")) > 1e-6 for row in rows)
    metrics = list(_METRICS) if differs else ["pass_at_1"]
    return {
        "before": name,
        "after": other,
        "all": _compared(before, after, keys, max_k, metrics),
        "benchmarks": {n: _compared(before, after, part, max_k, metrics) for n, part in groups.items()},
    }


def _compared(
    before: Mapping[Key, Any], after: Mapping[Key, Any], keys: list[Key], max_k: int, metrics: list[str]
) -> dict[str, Any]:
    """Compare the prompts `keys`. max_k: the largest k of pass@k: all prompts have as many samples on both sides."""
    result: dict[str, Any] = {"prompts": len(keys)}
    scores = {m: [[_score(answers[k], m) for k in keys] for answers in (before, after)] for m in metrics}
    for i, (side, answers) in enumerate((("before", before), ("after", after))):
        pass_at_max = float(np.mean([pass_at_k(answers[k]["samples"], answers[k]["right"], max_k) for k in keys]))
        means = {m: bootstrap_mean(x[i], _RESAMPLES, seed=0, bounds=_METRICS[m]["bounds"]) for m, x in scores.items()}
        result[side] = {
            **{m: mean.as_dict() for m, mean in means.items()},
            "pass_at_k": {"1": float(np.mean(scores["pass_at_1"][i])), str(max_k): pass_at_max},
            "response_tokens": float(np.mean([answers[k]["tokens"] for k in keys])),
        }
    result["lost"] = sum(before[k]["right"] > 0 and after[k]["right"] == 0 for k in keys)
    result["gained"] = sum(after[k]["right"] > 0 and before[k]["right"] == 0 for k in keys)
    if len(keys) > 1:  # A single difference has no spread.
        for m, (a, b) in scores.items():
            result[_METRICS[m]["test"]] = asdict(paired(a, b, _RESAMPLES, seed=0, bounds=_METRICS[m]["gap_bounds"]))
    return result


def markdown(result: Mapping[str, Any]) -> str:
    """Return a table of scores and tokens per benchmark, and the result of the paired test over all prompts."""
    widest_k, _ = widest(result["all"]["before"]["pass_at_k"]) or (None, None)  # None if each prompt has one sample
    pass_at_k_head = [f"{side} pass@{widest_k}" for side in "AB"] if widest_k else []
    metrics = [metric for metric in _METRICS if metric in result["all"]["before"]]
    labels = [_METRICS[metric]["label"] for metric in metrics]
    head = [cell for label in labels for cell in (f"A {label}", f"B {label}", "B - A (95% interval)")]
    rows = [["benchmark", "prompts", *head, *pass_at_k_head, "A tokens", "B tokens", "p (B > A)"]]
    for name, part in [*result["benchmarks"].items(), ("all prompts", result["all"])]:
        sides = (part["before"], part["after"])
        test = part.get("paired")
        rows.append(
            [
                name,
                str(part["prompts"]),
                *(cell for metric in metrics for cell in _change(part, metric)),
                *(f"{side['pass_at_k'][str(widest_k)]:.2%}" for side in sides if widest_k),
                *(f"{side['response_tokens']:.1f}" for side in sides),
                f"{test['one_tailed']:.2g}" if test else "-",
            ]
        )
    test = result["all"]["paired"]
    test_text = (
        f"Paired t-test over {result['all']['prompts']} prompts: mean difference {test['difference']['mean']:+.4f}, "
        f"t = {test['t']:.2f} with {test['degrees']} degrees of freedom, one-tailed p = {test['one_tailed']:.2g}, "
        f"two-tailed p = {test['two_tailed']:.2g}. Intervals are of the paired bootstrap over prompts."
    )
    if "mean_reward" in metrics:
        means = {side: result["all"][side]["mean_reward"]["mean"] for side in ("before", "after")}
        test_text += f"\n\nOver all prompts, {reward_change(means | result['all']['paired_reward'])[1]}."
    lost = (
        f"Prompts with a right answer among their samples only in A: {result['all']['lost']}, only in B: "
        f"{result['all']['gained']}."
    )
    # Paths as column headers would make the table too wide.
    return f"A = {result['before']}\n\nB = {result['after']}\n\n{table(rows)}\n{test_text}\n\n{lost}\n"


def _score(answer: Mapping[str, Any], metric: str) -> float:
    """Return pass@1 or the mean reward of a prompt. Files of earlier versions have no rewards."""
    pass_at_1 = float(answer["right"] / answer["samples"])
    return float(answer.get("reward", pass_at_1)) if metric == "mean_reward" else pass_at_1


def _change(part: Mapping[str, Any], metric: str) -> list[str]:
    """Return the means of A and B, and their difference with its interval if there are several prompts."""
    test, form = _METRICS[metric]["test"], _METRICS[metric]["form"]
    a, b = (part[side][metric]["mean"] for side in ("before", "after"))
    difference = part[test]["difference"] if test in part else None
    interval = f" ({difference['low']:+{form}} to {difference['high']:+{form}})" if difference else ""
    return [f"{a:{form}}", f"{b:{form}}", f"{b - a:+{form}}{interval}"]


def comparison_figure(result: Mapping[str, Any]) -> Figure:
    """Draw both scores, their difference with its interval, and score over tokens."""
    parts = {**result["benchmarks"], "all prompts": result["all"]}
    has_reward = "mean_reward" in result["all"]["before"]
    figure, (score, gap, tokens, *rewards) = figure_of(1, 3 + has_reward, width=13.5 + 4.5 * has_reward, height=4.2)
    panel(score, "Accuracy", "pass@1", "benchmark")
    for reward in rewards:
        panel(reward, "Rewards", "mean reward and 95% interval", "benchmark")
    panel(gap, "Difference", "B - A and 95% interval", "benchmark")
    panel(tokens, "Token efficiency", "pass@1", "mean response length (tokens)")
    for place, part in enumerate(parts.values()):
        ends = []
        for side, name, color, shift in (("before", "A", ORANGE, -0.2), ("after", "B", BLUE, 0.2)):
            accuracy = part[side]["pass_at_1"]["mean"]
            score.bar(place + shift, accuracy, width=0.4, color=color, label=None if place else name)
            tokens.plot(part[side]["response_tokens"], accuracy, "o", color=color)
            ends.append((part[side]["response_tokens"], accuracy))
            for reward in rewards:
                m = part[side]["mean_reward"]
                reward.errorbar(place + shift / 2, m["mean"], yerr=_error(m), color=color, marker="o", capsize=4)
        tokens.annotate("", xy=ends[1], xytext=ends[0], arrowprops={"arrowstyle": "->", "color": GREY})
        if "paired" in part:
            difference = part["paired"]["difference"]
            gap.errorbar(place, difference["mean"], yerr=_error(difference), color=BLUE, marker="o", capsize=4)
    gap.axhline(0, color=GREY, linestyle="--", linewidth=1)
    for axes in (score, gap, *rewards):
        _name_places(axes, list(parts))
    for axes in (score, gap, tokens):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    score.legend(frameon=False, fontsize=9)
    return figure


def _name_places(axes: Axes, names: list[str]) -> None:
    axes.xaxis.set_major_locator(FixedLocator(list(range(len(names)))))
    axes.set_xticklabels(names, rotation=20, ha="right")


def _error(p: Mapping[str, float]) -> list[list[float]]:
    """Return the distances below and above a mean."""
    return [[max(p["mean"] - p["low"], 0.0)], [max(p["high"] - p["mean"], 0.0)]]


def _intervals(part: Mapping[str, Any]) -> list[str]:
    reward = part["mean_reward"]
    return [_accuracy(part["pass_at_1"]), f"{reward['mean']:.4g} ({reward['low']:.4g} to {reward['high']:.4g})"]


def _accuracy(p: Mapping[str, float]) -> str:
    return f"{p['mean']:.2%} ({p['low']:.2%} to {p['high']:.2%})"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if len(known) == len(values) else None
