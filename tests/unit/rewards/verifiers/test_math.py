r"""Verifier `math` on answers written by hand, in answer_pairs.tsv.

A line has a kind, a reference, and answers. The first character of an answer marks it as = right, ! wrong, or ? right
but refused. In the kinds `hashes` and `choice` (verifier `choice`), an answer is a response with \u23ce for line ends.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from rows import row

from megatron_brorl.rewards.verifier import Score
from megatron_brorl.rewards.verifiers import choice
from megatron_brorl.rewards.verifiers import math as math_verifier
from megatron_brorl.rewards.verifiers.math import check_row, find, verify

LINES = Path(__file__).with_name("answer_pairs.tsv").read_text("utf-8").splitlines()
CASES = [line.split("\t") for line in LINES]
SOLUTION = "Each of 3 boxes holds 12 pens.\nSo there are 3 * 12 = <<3*12=36>>36 pens.\n#### 36"


@pytest.mark.parametrize("kind", dict.fromkeys(kind for kind, *_ in CASES))
def test_only_right_answers_are_rewarded(kind):
    verifier = choice if kind == "choice" else math_verifier
    for _, reference, *answers in (case for case in CASES if case[0] == kind):
        verifier.check_row(row(reference), "a:1")
        for mark, text in ((answer[0], answer[1:].replace("\u23ce", "\n")) for answer in answers):
            answer = verifier.find(text) if kind in ("hashes", "choice") else text
            score = Score(0.0, "no answer") if answer is None else verifier.verify(answer, row(reference))
            assert score.reward == (mark == "="), (reference, text, score.reason)
            assert bool(score.reason) == (mark != "=")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("(" * 5000 + "12" + ")" * 5000, "too long"),
        ("(" * 300 + "12" + ")" * 300, "deeper than 20"),
        ("9^{9^{9^{9}}}", "tower"),
        ("2^{10!}", "tower"),
        ("10^{99999}", "power above"),
        ("e^{e^{e^{9}}}", "tower"),
        ("100000!", "factorial"),
        ("(9^{99})!", "factorial"),
        (r"\binom{100000}{50000}", "binomial"),
        ("9" * 500, "digits"),
        (",".join("7" * 300), "more than 200"),
        (r"12}\boxed{13", "do not match"),
        (r"\sum_{k=1}^{3} 2k", "not computed"),
    ],
)
def test_slow_answers_are_rejected_before_sympy(answer, reason, monkeypatch):
    monkeypatch.setattr(math_verifier, "_same_value", lambda *_: pytest.fail("sympy was called"))
    score = verify(answer, row("12"))
    assert score.reward == 0
    assert reason in score.reason
    assert len(score.reason) < 120


@pytest.mark.parametrize("answer", ["e^{-(x-1)^2/2}", "2^{n^2}", "x^{4000}", "1000!/999!", "(x^2+1)^{10}", "(2^3)^{4}"])
def test_moderate_powers_and_factorials_are_computed(answer):
    assert verify(answer, row("12")).reason == f"{answer} is not 12"
    assert verify(answer.replace("x-1", "-1+x"), row(answer)).reward == 1


def test_slow_references_are_compared_as_text():
    assert verify("2^{2^{100}}", row("$2^{2^{100}}$")).reward == 1
    assert "only compared as text" in verify("2^x", row("2^{2^{100}}")).reason


def test_find_returns_the_final_answer():
    assert find(SOLUTION) == "36"
    assert find(r"First \boxed{35}? </think> It is \boxed{36}.") == "36"
    assert find(r"\boxed{36}, that is, \boxed{36.0} or \boxed{\frac{72}{2}}") == r"\frac{72}{2}"
    assert find(r"\boxed{35} or \boxed{36}") is None
    assert find("So there are 36 pens in 3 boxes.") is None  # the last number of a response is not an answer
    assert find(" 36 pens ") == "36 pens"


def test_references_in_the_forms_of_data_sets():
    for reference in ("36", SOLUTION, r"It follows that $x = \boxed{36}$.", "The answer is 36."):
        check_row(row(reference), "a:1")
        assert verify("36", row(reference)).reward == 1
        assert verify("37", row(reference)).reward == 0
    assert verify("37", row(SOLUTION)).reason == "37 is not 36"
    whole = verify(r"\boxed{35} or \boxed{36}", row("36"))  # with reward.extract = "full"
    assert whole.reason == "no answer: two different ones, 35 and 36"


def test_random_numbers_in_many_spellings():
    draw = random.Random(1)
    for _ in range(200):
        n = draw.randrange(-(10**7), 10**7)
        spellings = [f"{n:,}", f"{n}.0", rf"\frac{{{3 * n}}}{{3}}", rf"{n}\text{{ m}}", f"x = {n}", f"{n / 1000:.3f}e3"]
        for spelling in spellings:
            assert verify(spelling, row(str(n))).reward == 1, spelling
            assert verify(spelling, row(str(n + draw.choice([-10, -1, 1, 10])))).reward == 0, spelling
