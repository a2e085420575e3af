"""Scores are finite real numbers, with or without a reason and parts."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from megatron_brorl.rewards.verifier import NoScore, Score, score_of


@pytest.mark.parametrize(
    ("returned", "score"),
    [
        (0.25, Score(0.25)),
        (True, Score(1.0)),
        (-1, Score(-1.0)),
        (-1e30, Score(-1e30)),
        (Fraction(1, 2), Score(0.5)),
        (Decimal("0.9"), Score(0.9)),
        (np.float32(0.5), Score(0.5)),
        (np.bool_(True), Score(1.0)),  # the result of comparing arrays, which is not a numbers.Real
        (np.array([0.5]), Score(0.5)),
        (torch.tensor(-2.0), Score(-2.0)),
        (Score(0.5, "half", {"a": 1}), Score(0.5, "half", {"a": 1.0})),
        ({"reward": 0, "reason": "no"}, Score(0.0, "no")),
        ({"reward": -3, "parts": {"a": -4, "b": np.float32(1)}}, Score(-3.0, "", {"a": -4.0, "b": 1.0})),
    ],
)
def test_numbers_scores_and_dicts_are_scores(returned, score):
    assert score_of(returned) == score
    assert type(score_of(returned).reward) is float


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("1", "'1' for a reward"),
        (None, "None for a reward"),
        (math.nan, "nan for a reward"),
        (np.float32("nan"), "nan for a reward"),
        (1e31, "1e+31 for a reward"),
        (Decimal("NaN"), "an object of type Decimal for a reward"),
        ((0.5, "why"), "an object of type tuple for a reward"),
        (np.array([0.5, 1.0]), "an object of type ndarray for a reward"),
        (10**400, f"1{'0' * 59} for a reward"),
        (1j, "an object of type complex for a reward"),
        ({"score": 1}, "a dict with keys ['score'], not reward, reason, parts"),
        ({"reward": 1, "reason": 3}, "the reason 3"),
        ({"reward": 1, "parts": [1]}, "the parts [1]"),
        ({"reward": 1, "parts": {"a": math.inf}}, "inf for part 'a'"),
    ],
)
def test_other_values_are_refused_with_a_reason(returned, message):
    with pytest.raises(NoScore) as error:
        score_of(returned)
    assert str(error.value).startswith(f"returned {message}")


def test_reason_does_not_run_code_of_the_returned_object():
    class Liar(float):
        def __repr__(self) -> str:
            raise AssertionError

    with pytest.raises(NoScore, match="an object of type Liar"):
        score_of(Liar("nan"))
