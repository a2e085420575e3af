"""Scoring with reasoning-gym. Importing this file imports the library, which takes about a second."""

from __future__ import annotations

import decimal
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import reasoning_gym  # noqa: F401  (here, so that the import is not on the clock of the first answer)

from megatron_brorl.errors import UserError
from megatron_brorl.rewards import gym_grammar, gym_tasks
from megatron_brorl.rewards.verifier import Score, VerifierRow

PARTIAL_CREDIT_CAP = 0.98


def score(answer: str, row: VerifierRow) -> Score:
    """The library's verdict on `answer` for the item metadata["entry"] of task metadata["source_dataset"].

    Partial credit is capped: one wrong cell of a hundred scores 0.99 in the library, which must not pass for right.
    """
    metadata = row["metadata"]
    task, config = metadata["source_dataset"], metadata.get("config")
    if not gym_grammar.harmless(task, answer):
        return Score(0.0, f"not of the form of task {task}")
    if (problem := gym_grammar.row_problem(task, metadata["entry"])) is not None:
        raise UserError(problem)
    scorer = _scorer(task, json.dumps(config, sort_keys=True) if config else "{}")
    with decimal.localcontext(decimal.DefaultContext):  # a task that sets the precision must not set that of others
        value = scorer(answer, metadata["entry"])
    if value == 1:
        return Score(1.0)
    capped = PARTIAL_CREDIT_CAP if PARTIAL_CREDIT_CAP < value < 1 else value
    return Score(capped, "wrong" if value == 0 else f"partly right, says task {task}")


@functools.lru_cache(maxsize=128)
def _scorer(name: str, config: str) -> Callable[[str, Mapping[str, Any]], float]:
    scorer: Callable[[str, Mapping[str, Any]], float] = gym_tasks.create(
        name, 0, json.loads(config), "reward"
    ).score_answer
    return scorer
