"""What a page draws over steps: every figure of metrics.jsonl, right answers by task, and how prompts move."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from megatron_brorl.record.files import Moment, prompt_order
from megatron_brorl.report.run_files import Row, RunFiles

MOST_POINTS = 400  # of a curve; above, each is a mean of several steps
MOST_FILES = 400  # of steps' groups that are read; above, so many of them at even distances
FEW_SAMPLES = 16  # up to here a prompt's right answers are counted one by one, above in tenths
MOST_CELLS = 24_000  # of a heat map
TENTHS = ["none", *(f"{10 * i}-{10 * i + 10}%" for i in range(10)), "all"]


def curves(rows: Sequence[Row], most: int = MOST_POINTS) -> dict[str, Any]:
    """Every figure of the lines of metrics.jsonl, at most so many points of each.

    every: steps that a point is the mean of; step: the number of its last one, as in metrics.jsonl; elapsed: seconds
    of steps by then; values: by name, "time/" before those of "time"; null where a figure is missing. Of seven digits.
    """
    every = max(1, math.ceil(len(rows) / most))
    parts = [rows[i : i + every] for i in range(0, len(rows), every)]
    flat = [[_flat(row) for row in part] for part in parts]
    names = dict.fromkeys(name for part in flat for row in part for name in row)

    # A figure that is null in every step says nothing.
    values = {name: [_mean([row.get(name) for row in part]) for part in flat] for name in names}
    elapsed, seconds = [], 0.0
    for part in flat:
        seconds += sum(row.get("time/step") or 0.0 for row in part)
        elapsed.append(float(f"{seconds:.7g}"))

    # A point has the number of its last step, by which metrics.jsonl and brorl rollouts know it.
    return {
        "every": every,
        "step": [part[-1]["step"] for part in parts],
        "elapsed": elapsed,
        "values": {name: column for name, column in values.items() if any(v is not None for v in column)},
    }


def by_task(run: RunFiles) -> dict[str, Any]:
    """Over recorded steps, means over their groups: {"step", "distinct": [answers], "tasks": {name: [share right]}}."""
    steps = _spread_over(run.of_kind("step"), MOST_FILES)
    found: list[dict[str, list[float]]] = []
    distinct: list[float | None] = []
    for moment in steps:
        # Groups that came through, each with its task.
        rows = run.groups(moment).select(["verifier", "right", "rollouts", "distinct"]).to_pylist()
        shares: dict[str, list[float]] = {}
        for g in (g for g in rows if g["rollouts"]):
            shares.setdefault(g["verifier"] or "", []).append(g["right"] / g["rollouts"])
        found.append(shares)
        distinct.append(_mean([g["distinct"] for g in rows if g["rollouts"]]))

    # A task that a step did not ask has no share there.
    names = sorted({name for shares in found for name in shares})
    return {
        "step": [m.number for m in steps],
        "distinct": distinct,
        "tasks": {name: [_mean(shares.get(name, [])) for shares in found] for name in names},
    }


def spread(run: RunFiles, kind: str) -> dict[str, Any] | None:
    """How many prompts had how many right: bins, and counts [moments][bins]; None where nothing is recorded.

    Bins are numbers of right samples where every prompt has one and the same small number of them, `of`; else tenths.
    """
    found = [(m, _right(run, m)) for m in _spread_over(run.of_kind(kind), MOST_FILES)]
    found = [(m, pairs) for m, pairs in found if pairs]
    if not found:
        return None
    sizes = {n for _, pairs in found for _, n in pairs}
    exact = sizes.pop() if len(sizes) == 1 and max(sizes) <= FEW_SAMPLES else 0

    bins = [str(i) for i in range(exact + 1)] if exact else TENTHS
    counts = []
    for _, pairs in found:
        own = Counter(right if exact else _tenth(right, n) for right, n in pairs)
        counts.append([own[i] for i in range(len(bins))])
    return {"of": exact or None, "bins": bins, "numbers": [m.number for m, _ in found], "counts": counts}


def _right(run: RunFiles, moment: Moment) -> list[tuple[int, int]]:
    """(right, rollouts) of every group that has any."""
    groups = run.groups(moment)
    pairs = zip(groups["right"].to_pylist(), groups["rollouts"].to_pylist(), strict=True)
    return [(right, n) for right, n in pairs if n]


def _tenth(right: int, n: int) -> int:
    """The place in TENTHS: a share on a bound belongs to the tenth above it."""
    return 0 if not right else len(TENTHS) - 1 if right == n else 1 + 10 * right // n


def heat(run: RunFiles, kind: str, cells: int = MOST_CELLS) -> dict[str, Any] | None:
    """Share right of each prompt that occurs in two or more moments; None where there is no such prompt.

    shares: [prompts][moments], null where it was not asked; prompts in order of their first share, and then of their
    last. left_out: prompts that are too many for so many cells; which ones are shown depends on their ids alone.
    """
    # Nothing moves in one moment.
    there = _spread_over(run.of_kind(kind), MOST_FILES)
    if len(there) < 2:
        return None

    # By prompt and moment: shares of its groups, of which a step may have several.
    found: dict[str, dict[int, list[float]]] = {}
    tasks: dict[str, str] = {}
    for place, moment in enumerate(there):
        for g in run.groups(moment).select(["prompt_id", "verifier", "right", "rollouts"]).to_pylist():
            if g["rollouts"]:
                found.setdefault(g["prompt_id"], {}).setdefault(place, []).append(g["right"] / g["rollouts"])
                tasks[g["prompt_id"]] = g["verifier"] or ""

    # Prompts that one can see moving, as many as there is room for.
    again = sorted((p for p, own in found.items() if len(own) > 1), key=prompt_order)
    # By their ids alone, so that a page of more steps shows the same ones.
    shown = again[: max(1, cells // len(there))]
    if not shown:
        return None
    shares = {p: [_mean(found[p].get(place, [])) for place in range(len(there))] for p in shown}

    # Neighbours are alike: those that began alike, and of these those that end alike.
    def ends(p: str) -> tuple[float, float, str]:
        known = [v for v in shares[p] if v is not None]  # of the moments that asked it
        return known[0], known[-1], p

    order = sorted(shown, key=ends)
    return {
        # A row of shares for each prompt.
        "numbers": [m.number for m in there],
        "prompts": order,
        "tasks": [tasks[p] for p in order],
        "shares": [shares[p] for p in order],
        "left_out": len(again) - len(shown),  # prompts
    }


def _spread_over(there: list[Moment], most: int) -> list[Moment]:
    """At most so many, the first and the last among them."""
    if len(there) <= most:
        return there
    return [there[round(i * (len(there) - 1) / (most - 1))] for i in range(most)]


def _flat(row: Row) -> dict[str, Any]:
    own = {key: value for key, value in row.items() if key != "step" and isinstance(value, (int, float))}
    times = {f"time/{key}": value for key, value in (row.get("time") or {}).items()}
    return own | times


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return float(f"{sum(known) / len(known):.7g}") if known else None
