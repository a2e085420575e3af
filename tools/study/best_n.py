"""The map: how good each arm is at each share of the budget on each bin, and what a choice of N loses to the best one.

What is best is chosen on the other warm starts: on the runs themselves the largest of several scores is too large by
luck, and every choice would seem to lose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_brorl.errors import UserError
from study.design import Design
from study.end_points import Place, Results, curve, height


@dataclass(frozen=True)
class Cell:
    """A bin at a share of the budget."""

    bin: str
    share: float
    scores: Mapping[str, Mapping[int, float]]  # pass@1 by arm and warm start

    def mean(self, arm: str, without: int | None = None) -> float:
        """Over warm starts, but for one."""
        values = [x for seed, x in self.scores[arm].items() if seed != without]
        return sum(values) / len(values)

    def best(self, without: int | None = None) -> str:
        """The arm of the highest mean; of equal ones the first."""
        return max(self.scores, key=lambda arm: self.mean(arm, without))

    def regret(self, choices: Mapping[int, str]) -> list[float]:
        """By warm start: what the best arm of the others is ahead of the chosen one; choices: an arm by warm start."""
        return [self.scores[self.best(seed)][seed] - self.scores[arm][seed] for seed, arm in choices.items()]


def cells(design: Design, results: Results) -> list[Cell]:
    """Of the design's map, bin by bin. Raises UserError where a run is not done, or ended early."""
    chart = design.maps[0]
    limit = getattr(design.budget, chart.over)
    found = []
    for of in design.prompts.bins:
        curves = {}
        for arm in chart.arms:
            for seed in design.warm_starts.test:
                run = results.at(Place("test", arm, of.name, seed))
                if error := results.of(run, chart.prompt_set)[0]["error"]:
                    raise UserError(f"{run} ended early: {error}")
                curves[arm, seed] = curve(results.of(run, chart.prompt_set), chart.over)
        for share in chart.at:
            scores: dict[str, dict[int, float]] = {arm: {} for arm in chart.arms}
            for (arm, seed), points in curves.items():
                scores[arm][seed] = height(points, share * limit)
            found.append(Cell(of.name, share, scores))
    return found


def nearest(design: Design, n: int) -> str:
    """The arm of the map whose N is nearest by ratio; of two the one with fewer."""
    arms = sorted((design.arm(name) for name in design.maps[0].arms), key=lambda arm: arm.n)
    return min(arms, key=lambda arm: abs(math.log(arm.n / n))).name


@dataclass(frozen=True)
class Advised:
    """An answer of the advisor; None throughout: it knows none."""

    n: int | None
    low: int | None
    high: int | None
    prompts: int | None


def advised(results: Results) -> dict[tuple[str, int], Advised]:
    """By bin and warm start."""
    return {
        (row["bin"], row["warm_start"]): Advised(*(row[f"advised_{key}"] for key in ("n", "low", "high", "prompts")))
        for row in results.runs("pilot").values()
    }


def policies(design: Design, results: Results) -> dict[str, dict[tuple[str, int], str]]:
    """Ways to choose: the advisor, where it has an answer everywhere, and every arm always; arms by bin and seed."""
    places = [(of.name, seed) for of in design.prompts.bins for seed in design.warm_starts.test]
    answers = advised(results)
    found = {}
    if places and all(at in answers and answers[at].n for at in places):
        found["the advisor"] = {at: nearest(design, answers[at].n or 0) for at in places}
    return found | {f"always {name}": dict.fromkeys(places, name) for name in design.maps[0].arms}


def regrets(cell: Cell, choices: Mapping[tuple[str, int], str]) -> list[float]:
    """Of a way to choose in a cell, by warm start."""
    return cell.regret({seed: arm for (of, seed), arm in choices.items() if of == cell.bin})
