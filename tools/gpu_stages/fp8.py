"""(f) Steps on Transformer Engine's layers: every FP8 recipe of one GPU against bf16."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from bench_common import alone

from gpu_stages.common import Job, Row, apart, attempt, has, judged, missing
from gpu_stages.training import Case, measured

RECIPES = ("delayed", "tensorwise", "blockwise")
GAP = 0.3  # of the gradient norm, relative: FP8 keeps two to three bits of a mantissa


def run(job: Job) -> Iterator[Row]:
    """The rows of this stage."""
    names = ["step, bf16", *(f"step, FP8 {recipe}" for recipe in RECIPES)]
    if job.dry or not has("transformer_engine"):
        why = "no GPU" if job.dry else "pip install 'transformer-engine[pytorch]>=2.9,<2.12'"
        yield from (missing(name, f"Transformer Engine ({why})") for name in names)
        return

    # Every recipe in a process of its own, for a scaling state that one leaves is no other's.
    base: dict[str, Any] = {}
    for name, recipe in zip(names, ("none", *RECIPES), strict=True):
        yield attempt(name, partial(_step, name, recipe, base, job))


def _step(what: str, recipe: str, base: dict[str, Any], job: Job) -> Row:
    found = alone(measured, job, Case(share_prompt=False, fp8={"recipe": recipe}))
    if recipe == "none":
        base.update(found)
    return against_bf16(what, found, base)


def against_bf16(what: str, found: dict[str, Any], base: dict[str, Any]) -> Row:
    """The row of a recipe's figures. base: those of bf16; empty where they could not be had."""
    if found["skipped"]:
        return judged(what, f"{found['skipped']:.0f} updates were skipped: gradients are not finite", **found)
    if not base:
        return judged(what, "there is no bf16 step to compare it with", **found)
    gap, speed = apart(found["grad norm"], base["grad norm"]), base["seconds"] / found["seconds"]
    wrong = f"its gradient norm is {found['grad norm']:.4g}, that of bf16 {base['grad norm']:.4g}" if gap > GAP else ""
    return judged(what, wrong, **found, **{"speed over bf16": speed, "grad norm gap": gap})
