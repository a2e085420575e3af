"""Scores of all responses to a prompt together: by the function of reward.group_function, or by majority vote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

from megatron_brorl.rewards.answer_text import plain_number, plain_text
from megatron_brorl.rewards.verifier import NoScore, number, printable
from megatron_brorl.user_functions import describe, import_function

KEY = "reward.group_function"
MAJORITY = "majority"
PREFIX = "group "  # begins the names of judges of groups in worker processes


def judge(name: str) -> Callable[..., list[Any]]:
    """Return `score_group` for a worker process. name: a function, or "majority VERIFIER"."""
    kind, _, verifier = name.partition(" ")
    if kind == MAJORITY:
        return partial(score_group, lambda answers, **_: majority(answers, verifier))
    return partial(score_group, import_function(name, f"{KEY} =")[0])


def score_group(
    function: Callable[..., Any], row: dict[str, Any], texts: list[str], answers: list[str | None], rollouts: list[int]
) -> list[Any]:
    """Call the function of a group. Return [status, 0.0, reason, parts] with the score of each rollout in parts.

    Never raises. Parts are empty if the function returned None. "invalid": a score is missing or not finite.
    """
    try:
        returned = function(row=row, responses=texts, answers=answers)
        scores = None if returned is None else list(returned)
    except BaseException as e:  # includes SystemExit: a function must not end its worker
        return ["error", 0.0, printable(describe(e, function)), {}]
    try:
        if scores is not None and len(scores) != len(rollouts):
            raise NoScore(f"returned {len(scores)} scores for the {len(rollouts)} rollouts")
        pairs = zip(rollouts, scores or (), strict=False)
        return ["ok", 0.0, "", {str(i): number(score, f"for rollout {i}") for i, score in pairs}]
    except NoScore as e:
        return ["invalid", 0.0, printable(f"{e} of row {row['id']!r}"), {}]


def majority(answers: Sequence[str | None], verifier: str) -> list[float]:
    """Return 1 for answers that equal the most frequent answer, or the first of several such answers. Others get 0."""
    votes = [None if answer is None else answer_key(answer, verifier) for answer in answers]
    counts = Counter(vote for vote in votes if vote is not None)
    label = max(counts, key=counts.__getitem__, default=None)
    return [float(vote is not None and vote == label) for vote in votes]


def answer_key(answer: str, verifier: str) -> Hashable:
    """Return a value that is equal for equal answers: the same text for verifier "exact".

    Answers of other verifiers are equal if they are the same plain number, or the same text apart from case and format.
    For "choice", brackets and punctuation around the text do not count, either.
    """
    if verifier == "exact":
        return answer
    answer = answer.strip("()[].:* ") if verifier == "choice" else answer
    parsed = plain_number(answer)
    return (parsed.value, parsed.percent) if parsed else plain_text(answer).casefold()
