"""Two evaluations of the same prompts: who is better, by how much, how surely, and at how many tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, PercentFormatter

from megatron_brorl.algo.estimators import SHARE, bootstrap_mean, pass_at_k, widest
from megatron_brorl.algo.paired import SHARES, paired
from megatron_brorl.errors import UserError, shown
from megatron_brorl.report.benchmarks import table
from megatron_brorl.report.style import BLUE, GREY, ORANGE, panel, save

Key = tuple[str, str]  # benchmark, id of the prompt
_FIELDS = {"benchmark": str, "id": str, "samples": int, "right": int, "tokens": float}


def read_answers(path: Path) -> dict[Key, dict[str, Any]]:
    """The lines of an evaluation.jsonl by prompt. Raises UserError naming the line that is not one."""
    # A wrong folder and an unreadable file have different remedies.
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give the run.dir of a `brorl evaluate`") from None
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{path}: cannot be read: {e}") from None

    # One prompt per line; the first line that is none is named.
    found: dict[Key, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            missing = [k for k, kind in _FIELDS.items() if type(row[k]) not in (kind, int)]  # an integer is a float too
        except (ValueError, TypeError, KeyError, RecursionError) as e:  # no JSON, no object, or no such field
            raise UserError(f"{path}:{number}: not a line of `brorl evaluate` ({shown(e)}); evaluate again") from None
        if missing or row["samples"] < 1:
            raise UserError(f"{path}:{number}: {missing[0] if missing else 'samples'} is wrong; evaluate again")
        found[row["benchmark"], row["id"]] = row  # a prompt is named within its benchmark

    if not found:
        raise UserError(f"{path}: holds no prompts; evaluate again")
    return found


def compare(
    before: dict[Key, dict[str, Any]],
    after: dict[Key, dict[str, Any]],
    name: str,
    other: str,
    resamples: int = 10_000,
    seed: int = 0,
) -> dict[str, Any]:
    """JSON of the comparison over all prompts and per benchmark. Raises UserError unless the prompts are the same."""
    # A pair needs both sides.
    alone = sorted(before.keys() ^ after.keys())  # in one of them only
    if alone:
        benchmark, prompt = alone[0]
        where = name if alone[0] in before else other
        raise UserError(
            f"{name} and {other}: {len(alone)} prompts are in one of them only, for example {prompt!r} of {benchmark} "
            f"in {where}; evaluate both on the same files"
        )

    # Sorted, so that the bootstrap draws the same prompts in any order of lines.
    keys = sorted(before)
    if len(keys) < 2:
        raise UserError(f"{name}: a comparison needs at least 2 prompts")

    # pass@k at the largest k that every prompt has samples for, on both sides.
    names = sorted({benchmark for benchmark, _ in keys})
    groups = {n: [k for k in keys if k[0] == n] for n in names}  # prompts of each benchmark
    most = min(row["samples"] for row in (*before.values(), *after.values()))

    # The same figures for the whole and for each benchmark.
    return {
        "before": name,
        "after": other,
        "all": _compared(before, after, keys, most, resamples, seed),
        "benchmarks": {n: _compared(before, after, part, most, resamples, seed) for n, part in groups.items()},
    }


def _compared(
    before: dict[Key, Any], after: dict[Key, Any], keys: list[Key], most: int, resamples: int, seed: int
) -> dict[str, Any]:
    """most: samples that every prompt has at least, on both sides; the k of pass@k beside pass@1."""
    # Entry i of either side's scores is of keys[i]: that is what pairs them.
    sides: dict[str, Any] = {"prompts": len(keys)}
    scores = {}

    # Each side by itself.
    for side, answers in (("before", before), ("after", after)):
        scores[side] = [answers[k]["right"] / answers[k]["samples"] for k in keys]
        tokens = float(np.mean([answers[k]["tokens"] for k in keys]))
        # pass@k at k = most, unbiased.
        wide = float(np.mean([pass_at_k(answers[k]["samples"], answers[k]["right"], most) for k in keys]))
        sides[side] = {
            "pass_at_1": bootstrap_mean(scores[side], resamples, seed, SHARE).as_dict(),
            "pass_at_k": {"1": float(np.mean(scores[side])), str(most): wide},
            "response_tokens": tokens,
        }

    # Both, prompt by prompt.
    sides["lost"] = sum(before[k]["right"] > 0 == after[k]["right"] for k in keys)
    sides["gained"] = sum(after[k]["right"] > 0 == before[k]["right"] for k in keys)

    # One prompt has a gap, but no spread to test it against.
    if len(keys) > 1:
        sides["paired"] = paired(scores["before"], scores["after"], resamples, seed, SHARES).as_dict()
    return sides


def markdown(result: dict[str, Any]) -> str:
    """Scores and tokens of both per benchmark, and what the paired tests say of all prompts."""
    # Columns: a second pass@k only where every prompt has several samples.
    k = widest(result["all"]["before"]["pass_at_k"])  # None where each prompt has one sample
    wide = [f"{side} pass@{k[0]}" for side in "AB"] if k else []
    head = ["benchmark", "prompts", "A pass@1", "B pass@1", "B - A (95% interval)", *wide, "A tokens", "B tokens"]

    rows = [[*head, "p (B > A)"]]
    for name, part in [*result["benchmarks"].items(), ("all prompts", result["all"])]:
        a, b, test = part["before"], part["after"], part.get("paired")  # no test for a single prompt
        # The gap with its interval, where there are prompts enough for one.
        gap = f"{b['pass_at_1']['mean'] - a['pass_at_1']['mean']:+.2%}"
        if test:
            gap += f" ({test['difference']['low']:+.2%} to {test['difference']['high']:+.2%})"

        # In the order of the head; a pair of columns is left out where k is None.
        rows.append(
            [
                name,
                str(part["prompts"]),
                *(f"{x['pass_at_1']['mean']:.2%}" for x in (a, b)),
                gap,
                *(f"{x['pass_at_k'][str(k[0])]:.2%}" for x in (a, b) if k),
                *(f"{x['response_tokens']:.1f}" for x in (a, b)),
                f"{test['one_tailed']:.2g}" if test else "-",
            ]
        )

    # What the tests say of all prompts together.
    t = result["all"]["paired"]  # of all prompts
    said = (
        f"Paired t-test over {result['all']['prompts']} prompts: mean difference {t['difference']['mean']:+.4f}, "
        f"t = {t['t']:.2f} with {t['degrees']} degrees of freedom, one-tailed p = {t['one_tailed']:.2g}, "
        f"two-tailed p = {t['two_tailed']:.2g}. Intervals are of the paired bootstrap over prompts."
    )

    lost = (  # what pass@1 alone would not show
        f"Prompts with a right answer among their samples in A alone: {result['all']['lost']}, in B alone: "
        f"{result['all']['gained']}."
    )

    # Names stand above the table: as heads, paths would make it too wide.
    return f"A = {result['before']}\n\nB = {result['after']}\n\n{table(rows)}\n{said}\n\n{lost}\n"


def plot_comparison(result: dict[str, Any], path: Path) -> Path:
    """Write the figure and return its path."""
    return save(build_figure(result), path)


def build_figure(result: dict[str, Any]) -> Figure:
    """Scores of both, their difference with its interval, and score against tokens; `figure.axes` in this order."""
    parts = {**result["benchmarks"], "all prompts": result["all"]}  # all prompts last
    figure = Figure(figsize=(13.5, 4.2), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    score, gap, tokens = figure.subplots(1, 3)

    # Who is better, how surely, and at what length.
    panel(score, "Accuracy", "pass@1", "benchmark")
    panel(gap, "Difference", "B - A and 95% interval", "benchmark")
    panel(tokens, "Token efficiency", "pass@1", "mean response length (tokens)")
    for place, part in enumerate(parts.values()):
        # Both scores side by side, and an arrow from one to the other over tokens.
        ends = []
        for side, color, shift in (("before", ORANGE, -0.2), ("after", BLUE, 0.2)):  # A to the left of B
            p = part[side]["pass_at_1"]["mean"]
            score.bar(
                place + shift, p, 0.4, color=color, label={"before": "A", "after": "B"}[side] if not place else None
            )
            tokens.plot(part[side]["response_tokens"], p, "o", color=color)
            ends.append((part[side]["response_tokens"], p))
        tokens.annotate("", ends[1], ends[0], arrowprops={"arrowstyle": "->", "color": GREY})

        if "paired" in part:  # more than one prompt
            d = part["paired"]["difference"]
            # Distances below and above the mean.
            error = [[max(d["mean"] - d["low"], 0.0)], [max(d["high"] - d["mean"], 0.0)]]
            gap.errorbar(place, d["mean"], yerr=error, color=BLUE, marker="o", capsize=4)

    # A line where both are alike; names below, shares as percentages.
    gap.axhline(0, color=GREY, linestyle="--", linewidth=1)
    for axes in (score, gap):
        axes.xaxis.set_major_locator(FixedLocator(list(range(len(parts)))))
        axes.set_xticklabels(list(parts), rotation=20, ha="right")
    for axes in (score, gap, tokens):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))

    # Only the first benchmark's bars have labels: one entry for A, one for B.
    score.legend(frameon=False, fontsize=9)
    return figure
