"""From curves to numbers: areas and ends over a common stretch, the choice of a rate, and differences by warm start."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_brorl.errors import UserError
from megatron_brorl.report.spent import reached
from study.design import Axis, Comparison, Design, PromptSet
from study.order import Phase

Row = Mapping[str, Any]  # of the table of results
Curve = list[tuple[float, float]]  # (seconds, rollouts or tokens; pass@1 or pass@k), ascending


@dataclass(frozen=True)
class Place:
    """What a curve is of."""

    phase: Phase
    arm: str
    bin: str
    warm_start: int


def curve(rows: Sequence[Row], over: Axis, figure: str = "pass_at_1") -> Curve:
    """The points of one run and prompt set, without those where the figure is null."""
    found = sorted((float(row[over]), float(row[figure])) for row in rows if row[figure] is not None)
    if len(found) < 2:
        raise ValueError(f"{len(found)} points have {figure}: a curve needs two")
    return found


def height(points: Curve, at: float) -> float:
    """The curve at a place between its ends, linear between neighbours."""
    if not points[0][0] <= at <= points[-1][0]:
        raise ValueError(f"{at}: must be within {points[0][0]} and {points[-1][0]}")
    i = min(bisect_right([x for x, _ in points], at), len(points) - 1)
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return y1 if x1 == x0 else y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def area(points: Curve, end: float) -> float:
    """Mean height from the start to `end`, by the trapezoidal rule."""
    start = points[0][0]
    if end <= start:
        raise ValueError(f"{end}: must be above the start of the curve, {start}")
    inside = [*[p for p in points if p[0] < end], (end, height(points, end))]
    total = sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in itertools.pairwise(inside))
    return total / (end - start)


class Results:
    """The table, by what is asked of it."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self._by_run: dict[tuple[str, str], list[Row]] = {}
        for row in rows:
            self._by_run.setdefault((row["run"], row["prompt_set"]), []).append(row)

    def runs(self, phase: Phase) -> dict[str, Row]:
        """A row of every run of a phase, by its name, without parts on the way to a plateau."""
        return {row["run"]: row for row in self.rows if row["phase"] == phase and not row["part"]}

    def of(self, run: str, prompt_set: str) -> list[Row]:
        """The evaluations of a run, from first to last."""
        return sorted(self._by_run.get((run, prompt_set), []), key=lambda row: row["point"])

    def at(self, place: Place) -> str:
        """The name of the run there. Raises UserError where it is not done."""
        for name, row in self.runs(place.phase).items():
            if (row["arm"], row["bin"], row["warm_start"]) == (place.arm, place.bin, place.warm_start):
                return name
        raise UserError(
            f"no {place.phase} run of arm {place.arm} on {place.bin} prompts of warm start {place.warm_start} is done; "
            "start the same command again to go on"
        )


def chosen_rates(design: Design, results: Results) -> dict[str, float]:
    """Each tuned arm's rate by the design's rule. Raises UserError where no rate of an arm is left."""
    table = tuning_table(design, results)
    rates: dict[str, float] = {}
    for arm in (a.name for a in design.arms if not a.rate_of):
        scores = table.get(arm, {})
        best = max(scores.values(), default=float("-inf"))
        if best == float("-inf"):
            raise UserError(f"arm {arm}: no run of its tuning came to an end; lower its lr in a new design")
        rates[arm] = min(lr for lr, score in scores.items() if score == best)
    return rates


def tuning_table(design: Design, results: Results) -> dict[str, dict[float, float]]:
    """By arm and rate, the mean area over bins and warm starts; -inf where a run ended by an error."""
    table: dict[str, dict[float, list[float]]] = {}
    for name, row in results.runs("tune").items():
        of_rate = table.setdefault(row["arm"], {}).setdefault(row["lr"], [])
        if row["error"]:
            of_rate.append(float("-inf"))
            continue
        points = curve(results.of(name, design.tuning.prompt_set), design.tuning.over)
        of_rate.append(area(points, points[-1][0]))
    return {arm: {lr: sum(x) / len(x) for lr, x in sorted(of.items())} for arm, of in table.items()}


def differences(design: Design, comparison: Comparison, results: Results) -> dict[int, float]:
    """after - before by warm start, each read at the place where the shorter of the two runs ends."""
    c = comparison
    seeds = design.plateau[0].warm_starts if c.phase == "plateau" else design.warm_starts.test
    return {seed: _mean([_difference(c, results, of, seed) for of in c.bins]) for seed in seeds}


def _difference(c: Comparison, results: Results, of: str, seed: int) -> float:
    curves = []
    for arm in (c.before, c.after):
        run = results.at(Place(c.phase, arm, of, seed))
        if error := results.of(run, c.prompt_set)[0]["error"]:
            raise UserError(f"{run} ended early: {error}")
        curves.append(curve(results.of(run, c.prompt_set), c.over, c.figure))
    end = min(points[-1][0] for points in curves)
    before, after = (height(p, end) if c.end_point == "final" else area(p, end) for p in curves)
    return after - before


def seconds_to_end(results: Results, place: Place, other: Place) -> tuple[float | None, float]:
    """When a run first holds the pass@1 on trained prompts that another one ends with, and when that one ends.

    None where it never does; curves are linear between evaluations. Raises UserError where one of them is not done.
    """
    own, to = (curve(results.of(results.at(p), "trained"), "seconds") for p in (place, other))
    return reached([x for x, _ in own], [y for _, y in own], to[-1][1]), to[-1][0]


@dataclass(frozen=True)
class Support:
    """Trained prompts with a right answer among many samples, before and after a run."""

    samples: int
    before: int
    after: int
    lost: int
    gained: int


def support(results: Results, run: str) -> Support | None:
    """Of a run; None where the design asks for no such samples."""
    rows = results.of(run, "support")
    if not rows:
        return None
    first, last = rows[0], rows[-1]
    if list(first["prompts"]) != list(last["prompts"]):
        raise ValueError(f"{run}: other prompts before than after")
    pairs = [(a > 0, b > 0) for a, b in zip(first["right"], last["right"], strict=True)]
    return Support(
        samples=max(last["samples"]),
        before=sum(a for a, _ in pairs),
        after=sum(b for _, b in pairs),
        lost=sum(a and not b for a, b in pairs),
        gained=sum(b and not a for a, b in pairs),
    )


def final_shares(results: Results, of: str, prompt_set: PromptSet) -> list[dict[str, Any]]:
    """Per test run of a bin and prompt, what mixed_model takes; of the runs' last evaluations."""
    found = []
    for name, row in results.runs("test").items():
        if row["bin"] != of:
            continue
        last = results.of(name, prompt_set)[-1]
        for prompt, right, samples in zip(last["prompts"], last["right"], last["samples"], strict=True):
            found.append(
                {"share": right / samples, "arm": row["arm"], "warm_start": row["warm_start"], "prompt": prompt}
            )
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
