from __future__ import annotations

from fractions import Fraction

import pytest

from megatron_brorl.rewards.answer_text import plain_number, unit


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.1", Fraction(1, 10)),
        ("0.1\\overline{6}", Fraction(1, 6)),
        ("-2\\frac{3}{4}", Fraction(-11, 4)),
        ("¾", Fraction(3, 4)),
        ("1,234,567.25", Fraction(4938269, 4)),
        ("1\u202f234", 1234),
        ("6.02 \\times 10^{23}", 602 * 10**21),
        ("1e-3", Fraction(1, 1000)),
        ("(3/4)", Fraction(3, 4)),
        ("US$5", 5),
        ("1.5 million dollars", 1500000),
        ("12345678901234567890.1", Fraction(123456789012345678901, 10)),
        ("f(2) = 7", 7),
        ("Total cost = $18", 18),
        ("12 boxes of apples.", 12),
        ("3 quarters", 3),
    ],
)
def test_plain_numbers_are_parsed_exactly(text, value):
    assert plain_number(text).value == value


@pytest.mark.parametrize(
    "text",
    ["", "x", "1,23", "1 2", "1-2", "2x", "5!", "3:4", "2^3", "10²3", "1/0", "1/2/3", "12 and 13", "12 minus one",
     "1e99999", "3 5/2", "log 3", "log x = 3", "xy = 6", "12 hundredths", "--5", "5m", "1" * 201, "12 " * 30, "²"],
)  # fmt: skip
def test_other_texts_are_not_plain_numbers(text):
    assert plain_number(text) is None


def test_a_percent_sign_on_one_side_is_accepted():
    ten = plain_number("10%")
    for text, right in [("10", True), ("0.1", True), ("10%", True), ("0.1%", False), ("1", False), ("1000", False)]:
        assert ten.equals(plain_number(text)) == plain_number(text).equals(ten) == right, text


@pytest.mark.parametrize(
    ("text", "powers"),
    [
        ("km/h", {"km": 1, "h": -1}),
        ("kilometers per hour", {"km": 1, "h": -1}),
        ("m s^{-2}", {"m": 1, "s": -2}),
        ("square feet", {"ft": 2}),
        ("meters squared", {"m": 2}),
        ("kg \\cdot m/s^2", {"kg": 1, "m": 1, "s": -2}),
        ("m/m", None),
        ("apples", None),
        ("dollars each", None),
    ],
)
def test_units_are_parsed(text, powers):
    assert unit(text) == powers


@pytest.mark.parametrize(
    ("a", "b", "clash"),
    [
        ("5 m", "5 cm", True),
        ("5 m", "5 m^2", True),
        ("5 dollars", "$5 per day", False),
        ("5 apples", "5 m", False),
        ("x = 5", "y = 5", True),
        ("x = 5", "S = 5", False),
    ],
)
def test_different_units_and_variables_clash(a, b, clash):
    assert plain_number(a).clashes(plain_number(b)) == clash
