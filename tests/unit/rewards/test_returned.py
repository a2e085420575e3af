"""What counts as a score, told by the published rule: a real number in [0, 1], with or without reason and parts."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest

from megatron_brorl.rewards.returned import NoScore, score_of
from megatron_brorl.rewards.verifier import Score


@pytest.mark.parametrize(
    ("returned", "score"),
    [
        (0.25, Score(0.25)),
        (1, Score(1.0)),
        (True, Score(1.0)),
        (Fraction(1, 2), Score(0.5)),
        (Score(0.5, "half", {"a": 1}), Score(0.5, "half", {"a": 1.0})),
        ({"reward": 0, "reason": "no"}, Score(0.0, "no")),
        ({"reward": 1.0, "parts": {"a": 1, "b": 0.5}}, Score(1.0, "", {"a": 1.0, "b": 0.5})),
    ],
)
def test_three_forms(returned: Any, score: Score) -> None:
    found = score_of(returned)
    assert found == score
    assert type(found.reward) is float


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        ("1", "returned '1' for a reward, not a number in [0, 1]"),
        (None, "returned None for a reward, not a number in [0, 1]"),
        (math.nan, "returned nan for a reward, not a number in [0, 1]"),
        (1.5, "returned 1.5 for a reward, not a number in [0, 1]"),
        (-1e-9, "returned -1e-09 for a reward, not a number in [0, 1]"),
        (10**400, f"returned 1{'0' * 59} for a reward, not a number in [0, 1]"),
        (1j, "returned an object of type complex for a reward, not a number in [0, 1]"),
        ({"score": 1}, "returned a dict with keys ['score'], not reward, reason, parts"),
        ({"reward": 1, "reason": 3}, "returned the reason 3, not a string"),
        ({"reward": 1, "parts": [1]}, "returned the parts [1], not a dict of numbers by name"),
        ({"reward": 1, "parts": {"a": 2}}, "returned 2 for part 'a', not a number in [0, 1]"),
        (Score("x" * 100), f"returned '{'x' * 59} for a reward, not a number in [0, 1]"),  # type: ignore[arg-type]
    ],
)
def test_the_rest_says_what_it_was(returned: Any, why: str) -> None:
    with pytest.raises(NoScore) as error:
        score_of(returned)
    assert str(error.value) == why


def test_an_object_that_lies_about_itself_is_not_asked() -> None:
    class Liar(float):
        def __repr__(self) -> str:
            raise AssertionError

    with pytest.raises(NoScore, match="an object of type Liar"):
        score_of(Liar(2))
