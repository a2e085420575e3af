"""Tests that the calculator agrees with Python, refuses other expressions, and compares answers exactly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_brorl.environments.calculator import Calculator

NUMBERS = st.integers(0, 999).map(str) | st.floats(0, 99, allow_subnormal=False).map(lambda x: f"{x:.2f}")
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: (
        st.tuples(inner, st.sampled_from(("+", "-", "*", "/", "//", "%")), inner).map(
            lambda t: f"({t[0]} {t[1]} {t[2]})"
        )
        | inner.map(lambda e: f"-{e}")
        | inner.map(lambda e: f"({e}) ** 2")
    ),
    max_leaves=6,
)


@given(EXPRESSIONS.filter(lambda e: len(e) <= 200))
def test_values_are_those_of_python(expression: str) -> None:
    try:
        expected = str(eval(expression))
    except (ZeroDivisionError, OverflowError):
        expected = "error:"
    found = Calculator().calculate(expression)
    # The calculator limits integers to 1,024 bits.
    assert found == expected or (found.startswith("error:") and (expected == "error:" or len(expected) > 300))


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1 / 0", "division by zero"),
        ("2 +", "invalid syntax"),
        ("2 ** 3 ** 99", "the power is too large"),
        ("9.0 ** 9999", "Numerical result out of range"),
        ("10 ** 200 * 10 ** 200", "more than 1024 bits"),
        ("(-8) ** 0.5", "not a real number"),
        ("1+" * 100 + "1", "more than 200 characters"),
        ("(" * 150, ""),
        ("\ud800", ""),
        *[(text, "only numbers") for text in ("x", "True", "'a' * 9", "[1]", "f()", "1j", "~1", "1 << 9")],
    ],
)
def test_other_expressions_are_refused(expression: str, message: str) -> None:
    found = Calculator().calculate(expression)
    assert found.startswith("error: ")
    assert message in found


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("2 + 3 = 5", "5", 1.0),
        ("It is 5.0.", "5", 1.0),
        ("-1,234", "-1234", 1.0),
        ("5 or 6", "5", 0.0),
        ("9007199254740993", "9007199254740992", 0.0),
        ("", "5", 0.0),
    ],
)
def test_the_reward_compares_the_last_number(text: str, answer: str, reward: float) -> None:
    calculator = Calculator()
    calculator.reset({"answer": answer})
    assert calculator.reward() == 0.0
    calculator.final(text)
    assert calculator.reward() == reward
