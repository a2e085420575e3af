"""Verifiers of answers that are token ids as text. They do not import torch, because the pool's workers import them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from megatron_brorl.rewards.verifier import Judge, VerifierRow

RULES: dict[str, Callable[[list[int]], float]] = {
    "right": lambda ids: 1.0,
    "wrong": lambda ids: 0.0,
    "even": lambda ids: float(sum(ids) % 2 == 0),
    "share": lambda ids: sum(i % 2 == 0 for i in ids) / max(len(ids), 1),  # partial credit
    "half": lambda ids: sum(i % 2 == 0 for i in ids) / max(len(ids), 1) / 2,  # never 1
    "stretched": lambda ids: 6.0 * sum(i % 2 == 0 for i in ids) / max(len(ids), 1) - 2.5,  # from -2.5 to 3.5
    "some_nan": lambda ids: math.nan if sum(ids) % 3 == 0 else float(sum(ids) % 2),
    "nan": lambda ids: math.nan,
    "picky": lambda ids: float(1 / (sum(ids) % 2 - 1) < 0),  # raises on odd sums
}


def logged(answer: str, row: VerifierRow) -> float:
    """Return 1 for an even sum; append the row and the answer to a file."""
    with Path(row["metadata"]["log"]).open("a") as log:
        log.write(f"{row['id']}: {answer}\n")
    return RULES["even"]([int(word) for word in answer.split()])


def make(name: str) -> Judge:
    if name == "logged":
        return Judge(logged)
    return Judge(lambda answer, _row: RULES[name]([int(word) for word in answer.split()]))
