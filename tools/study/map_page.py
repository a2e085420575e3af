"""The part of a study's page that has its map."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_brorl.errors import UserError
from megatron_brorl.report.benchmarks import table
from study.best_n import Cell, advised, cells, nearest, policies, regrets
from study.design import Design
from study.end_points import Results


def section(design: Design, results: Results) -> str:
    """Scores and best arm of every cell, the advisor's answers, and what each way to choose loses."""
    chart = design.maps[0]
    try:
        found = cells(design, results)
    except UserError as e:
        return f"## Map\n\nNot there yet: {e}\n"
    limit = getattr(design.budget, chart.over)
    rows = [["bin", chart.over, *chart.arms, "best"]]
    for cell in found:
        scores = [f"{cell.mean(arm):.1%}" for arm in chart.arms]
        rows.append([cell.bin, f"{cell.share * limit:,.4g}", *scores, _best(design, cell)])
    return (
        f"## Map\n\npass@1 on {chart.prompt_set} prompts, means over {len(design.warm_starts.test)} warm starts; best: "
        "by the mean, and in brackets by each warm start alone.\n\n"
        f"{table(rows)}\n{_advice(design, results)}\n{_regret(design, results, found)}"
    )


def _best(design: Design, cell: Cell) -> str:
    own = [max(cell.scores, key=lambda arm: cell.scores[arm][seed]) for seed in design.warm_starts.test]
    return f"{cell.best()} ({', '.join(own)})"


def _advice(design: Design, results: Results) -> str:
    answers = advised(results)
    if not answers:
        return ""
    rows = [["bin", "warm start", "N (95% interval)", "prompts per step", "nearest arm"]]
    for (of, seed), a in sorted(answers.items()):
        if a.n is None:
            rows.append([of, str(seed), "unknown", "", ""])
            continue
        rows.append([of, str(seed), f"{a.n} ({a.low} to {a.high})", str(a.prompts), nearest(design, a.n)])
    steps, pilot = design.maps[0].steps, design.maps[0].pilot
    return f"`brorl advise` on {steps} steps of {pilot} at each warm start:\n\n{table(rows)}"


def _regret(design: Design, results: Results, found: Sequence[Cell]) -> str:
    """Rows: ways to choose. Columns: cells, and their mean."""
    limit = getattr(design.budget, design.maps[0].over)
    rows = [["", *(f"{c.bin}, {c.share * limit:,.4g}" for c in found), "mean", "worst cell"]]
    for name, choices in policies(design, results).items():
        values = [_mean(regrets(cell, choices)) for cell in found]
        rows.append([name, *(f"{x:+.1%}" for x in values), f"{_mean(values):+.1%}", f"{max(values):+.1%}"])
    return (
        "Regret: points of pass@1 behind the arm that is best on the *other* warm starts, which is why it may be "
        f"negative.\n\n{table(rows)}"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
