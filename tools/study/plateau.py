"""The way to a plateau, one continuation at a time, and what goes on from there."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

from study.design import Design, Plateau
from study.end_points import Results
from study.order import Run, rate_of


def next_part(design: Design, rates: Mapping[str, float], results: Results, seed: int, of: str) -> Run | None:
    """The continuation that comes next; None where the plateau is reached, or no more are allowed."""
    plateau = design.plateau[0]
    parts = parts_done(plateau, results, seed, of)
    lr, cut = rate_of(design.arm(plateau.arm), rates), False
    for i, run in enumerate(parts, start=1):
        if gain(results, run) < plateau.gain:
            if cut:
                return None  # a rate that was cut gains nothing either
            lr, cut = lr * plateau.cut, True
        else:
            cut = False
        if i == plateau.most:
            return None
    return Run("plateau", plateau.arm, of, seed, lr, parts[-1] if parts else "", len(parts) + 1)


def parts_done(plateau: Plateau, results: Results, seed: int, of: str) -> list[str]:
    """The names of the continuations so far, in order."""
    found = {
        row["part"]: row["run"]
        for row in results.rows
        if row["phase"] == "plateau" and row["part"] and (row["warm_start"], row["bin"]) == (seed, of)
    }
    return [found[part] for part in sorted(found)]


def gain(results: Results, run: str) -> float:
    """pass@1 on the trained prompts at a run's end, less that at its start."""
    rows = results.of(run, "trained")
    return float(rows[-1]["pass_at_1"] - rows[0]["pass_at_1"])


def reached(plateau: Plateau, results: Results, seed: int, of: str) -> bool:
    """Whether the last continuation, at a rate that was cut, gained too little."""
    parts = parts_done(plateau, results, seed, of)
    return len(parts) > 1 and all(gain(results, run) < plateau.gain for run in parts[-2:])


def on_from(design: Design, results: Results, seed: int, of: str) -> list[Run]:
    """The arms that go on from the last continuation, in random order."""
    plateau = design.plateau[0]
    last = parts_done(plateau, results, seed, of)[-1]
    lr = results.of(last, "trained")[0]["lr"]
    first = design.arm(plateau.arm)
    runs = []
    for arm in map(design.arm, plateau.arms):
        scale = math.sqrt(arm.n * arm.prompts / (first.n * first.prompts))  # Krizhevsky 2014, as optim.lr_for_rollouts
        runs.append(Run("plateau", arm.name, of, seed, lr * scale, last))
    return random.Random(f"{design.order_seed}:plateau:{seed}:{of}").sample(runs, len(runs))
