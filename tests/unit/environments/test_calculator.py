"""Tests that the calculator agrees with Python, refuses other expressions, and compares answers exactly."""

import pytest

from megatron_brorl.environments.calculator import Calculator

VALUES = (
    *("2+3*4", "(2+3)*4", "7 - 9 - 1", " -7//2", "-7%3", "7//-2", "-2**2", "2**3**2", "2**-3", "+5", "--5", "10**300"),
    *("8/3", "6/3", "0.1+0.2", "12.50", "4.5%2", "-0.0", "1e308*10", "0.5**0.5", "7.5//2", "2**1000", "((8))/(-2.5)"),
)


@pytest.mark.parametrize("expression", VALUES)
def test_values_are_those_of_python(expression):
    assert Calculator().calculate(expression) == str(eval(expression.strip()))


REFUSED = {
    "division by zero": ["1 / 0"],
    "the power is too large": ["2 ** 3 ** 99"],
    "Numerical result out of range": ["9.0 ** 9999"],
    "more than 1024 bits": ["10 ** 200 * 10 ** 200"],
    "not a real number": ["(-8) ** 0.5"],
    "more than 200 characters": ["1+" * 100 + "1"],
    "only numbers": ["x", "True", "'a' * 9", "[1]", "f()", "1j", "~1", "1 << 9", "3 if 1 else 2"],
    "": ["2 +", "", "(" * 150, "\ud800"],
}


@pytest.mark.parametrize(("message", "expression"), [(m, e) for m, es in REFUSED.items() for e in es])
def test_other_expressions_are_refused(message, expression):
    result = Calculator().calculate(expression)
    assert result.startswith("error: ")
    assert message in result


def test_the_reward_compares_the_last_number():
    right = [("2 + 3 = 5", "5"), ("It is 5.0.", "5"), ("-1,234", "-1234")]
    for text, answer in [*right, ("5 or 6", "5"), ("9007199254740993", "9007199254740992"), ("", "5")]:
        calculator = Calculator()
        calculator.reset({"answer": answer})
        assert calculator.reward() == 0.0
        calculator.final(text)
        assert calculator.reward() == ((text, answer) in right)
