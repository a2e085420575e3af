"""Scores are finite real numbers, with or without a reason and parts."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from megatron_brorl.rewards.verifier import NoScore, Score, score_of


@pytest.mark.parametrize(
    ("returned", "score"),
    [
        (0.25, Score(0.25)),
        (1, Score(1.0)),
        (True, Score(1.0)),
        (-1, Score(-1.0)),
        (-1e30, Score(-1e30)),
        (Fraction(1, 2), Score(0.5)),
        (Decimal("0.9"), Score(0.9)),
        (np.float64(-0.25), Score(-0.25)),
        (np.float32(0.5), Score(0.5)),
        (np.int64(3), Score(3.0)),
        (np.bool_(True), Score(1.0)),  # the result of comparing arrays, which is not a numbers.Real
        (np.array([0.5]), Score(0.5)),
        (torch.tensor(-2.0), Score(-2.0)),
        (torch.tensor(True), Score(1.0)),
        (Score(0.5, "half", {"a": 1}), Score(0.5, "half", {"a": 1.0})),
        ({"reward": 0, "reason": "no"}, Score(0.0, "no")),
        ({"reward": 1.0, "parts": {"a": 1, "b": 0.5}}, Score(1.0, "", {"a": 1.0, "b": 0.5})),
        (
            {"reward": -3, "parts": {"length": -4, "right": np.float32(1)}},
            Score(-3.0, "", {"length": -4.0, "right": 1.0}),
        ),
    ],
)
def test_numbers_scores_and_dicts_are_scores(returned: Any, score: Score) -> None:
    found = score_of(returned)
    assert found == score
    assert type(found.reward) is float


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        ("1", "returned '1' for a reward, not a finite number (1e+30 at most)"),
        (None, "returned None for a reward, not a finite number (1e+30 at most)"),
        (math.nan, "returned nan for a reward, not a finite number (1e+30 at most)"),
        (math.inf, "returned inf for a reward, not a finite number (1e+30 at most)"),
        (np.float32("nan"), "returned nan for a reward, not a finite number (1e+30 at most)"),
        (1e31, "returned 1e+31 for a reward, not a finite number (1e+30 at most)"),
        (Decimal("NaN"), "returned an object of type Decimal for a reward, not a finite number (1e+30 at most)"),
        (b"1", "returned an object of type bytes for a reward, not a finite number (1e+30 at most)"),
        ([0.5], "returned [0.5] for a reward, not a finite number (1e+30 at most)"),
        ((0.5, "why"), "returned an object of type tuple for a reward, not a finite number (1e+30 at most)"),
        (np.array([0.5, 1.0]), "returned an object of type ndarray for a reward, not a finite number (1e+30 at most)"),
        (10**400, f"returned 1{'0' * 59} for a reward, not a finite number (1e+30 at most)"),
        (1j, "returned an object of type complex for a reward, not a finite number (1e+30 at most)"),
        ({"score": 1}, "returned a dict with keys ['score'], not reward, reason, parts"),
        ({"reward": 1, "reason": 3}, "returned the reason 3, not a string"),
        ({"reward": 1, "parts": [1]}, "returned the parts [1], not a dict of numbers by name"),
        ({"reward": 1, "parts": {"a": math.inf}}, "returned inf for part 'a', not a finite number (1e+30 at most)"),
        (Score("x" * 100), f"returned '{'x' * 59} for a reward, not a finite number (1e+30 at most)"),  # type: ignore[arg-type]
    ],
)
def test_other_values_are_refused_with_a_reason(returned: Any, why: str) -> None:
    with pytest.raises(NoScore) as error:
        score_of(returned)
    assert str(error.value) == why


def test_reason_does_not_run_code_of_the_returned_object() -> None:
    class Liar(float):
        def __repr__(self) -> str:
            raise AssertionError

    with pytest.raises(NoScore, match="an object of type Liar"):
        score_of(Liar("nan"))
