r"""Verifier `math`: is the answer the reference's number, or an expression equal to it?

Plain numbers on both sides are compared exactly (plain_number.py). Everything else, `\frac{\pi}{4}`, sets, intervals,
matrices, goes to math-verify, which reads LaTeX with sympy. It has no timeout here: a verifier's process has one.
"""

from __future__ import annotations

import functools
import logging
import re
from fractions import Fraction
from typing import Any

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.final_answer import disagreement, final_answer, places, same_text
from megatron_brorl.rewards.plain_number import MAX_CHARS, NAME, PlainNumber, equal, plain_number, units_clash
from megatron_brorl.rewards.spelling import ascii_text, quote
from megatron_brorl.rewards.sympy_guard import refusal, restates
from megatron_brorl.rewards.verifier import Score, Verifier, VerifierRow

_RIGHT = Score(1.0)
_DELIMITERS = re.compile(r"(?<!\\)(?:\$|\\[()\[\]])")
_PYTHON_ROOT = re.compile(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)|\\sqrt\s*\(([^()]*)\)")
_PYTHON_NAME = re.compile(r"(?<![\\A-Za-z])(pi|infty)(?![A-Za-z])")
_NAME = re.compile(rf"\s*{NAME}\s*")


def find(response: str) -> str | None:
    """The answer that a response says (final_answer.py); the whole response where it is a plain number alone."""
    if len(response) <= MAX_CHARS and not places(response):
        bare = response.strip()
        return bare if plain_number(bare) else None
    return final_answer(response, same)


def same(a: str, b: str) -> bool:
    """Whether two places of a response say one answer: the same text or the same plain number."""
    if same_text(a, b):
        return True
    x, y = plain_number(a), plain_number(b)
    return x is not None and y is not None and equal(x, y) and not units_clash(x, y)


def check_row(row: VerifierRow, where: str) -> None:
    """The reference must say one answer: bare, boxed, or as a solution of GSM8K with its `####`."""
    answer = row["answer"]
    if not isinstance(answer, str) or not answer.strip():
        raise UserError(f'{where}: verifier "math" needs answer, the reference answer as text')
    why = disagreement(places(answer), same)
    if why:
        several = why.partition(": ")[2]
        raise UserError(f'{where}: answer has {several}; leave the one that verifier "math" shall compare')


def verify(answer: str, row: VerifierRow) -> Score:
    """1 for an answer equal to the reference."""
    # The text of an answer, or of a whole response where reward.extract says so.
    said = places(answer) or [answer.strip()]
    why = disagreement(said, same)
    if why:
        return Score(0.0, why)
    given, reference = said[-1], reference_of(row)

    # Plain numbers are compared here, exactly.
    differ = Score(0.0, f"{quote(given)} is not {quote(reference)}")
    number, wanted = plain_number(given), plain_number(reference)
    if number and wanted:
        return _RIGHT if equal(number, wanted) and not units_clash(number, wanted) else differ
    if same_text(given, reference):
        return _RIGHT

    # What is not an answer is not worth the algebra.
    why = refusal(given) or _not_a_value(given, reference)
    if why:
        return Score(0.0, why)
    why = refusal(reference)
    if why:
        return Score(0.0, f"the reference is compared as text alone: {why}")
    return _RIGHT if _algebra(_latex(reference, wanted), _latex(given, number)) else differ


def reference_of(row: VerifierRow) -> str:
    """The answer in a row's reference."""
    answer = row["answer"] or ""
    said = places(answer)
    return said[-1] if said else answer.strip()


def load() -> Verifier:
    """The verifier, with math-verify imported: its second of imports is on no answer's clock."""
    _library()
    return verify


def _not_a_value(given: str, reference: str) -> str:
    """Why an expression is no answer although its value may be right; "" if it may be one."""
    undone = restates(given, reference)
    if undone:
        return f"{undone} is left to be computed"

    # math-verify takes the right side of any equation for the value: 2x = 6 is not 6, but x = 6 and 2 + 4 = 6 are.
    left, equals, _ = given.partition("=")
    if equals and "=" not in reference and left[-1:] not in ("<", ">", "!"):
        name = _DELIMITERS.sub("", left)
        if not _NAME.fullmatch(name) and re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", name)):
            return f"{quote(given)} is an equation, not a value"
    return ""


def _latex(text: str, number: PlainNumber | None) -> str:
    """What math-verify reads: a plain number in a spelling that it cannot misread, or the text without dollars."""
    if number is not None:
        value: Fraction = number.value / 100 if number.percent else number.value
        sign = "-" if value < 0 else ""
        top, bottom = abs(value.numerator), value.denominator
        return f"{sign}{top}" if bottom == 1 else rf"{sign}\frac{{{top}}}{{{bottom}}}"
    text = _DELIMITERS.sub("", ascii_text(text)).strip().rstrip(".")
    text = _PYTHON_ROOT.sub(lambda m: rf"\sqrt{{{m[1] or m[2]}}}", text)
    return _PYTHON_NAME.sub(r"\\\1 ", text)


def _algebra(reference: str, given: str) -> bool:
    """math-verify's verdict. What it parsed is compared and forgotten: to print such an object can take for ever."""
    parse, compare = _library()
    return bool(compare(_parsed(reference), parse(given), allow_set_relation_comp=True, timeout_seconds=None))


@functools.lru_cache(maxsize=256)
def _parsed(reference: str) -> Any:
    return _library()[0](reference)


@functools.lru_cache(maxsize=1)
def _library() -> tuple[Any, Any]:
    """math-verify's parser of one boxed formula, without its alarm, and its comparison."""
    import math_verify
    from math_verify.parser import LatexExtractionConfig

    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)  # it would log whole answers
    config = (LatexExtractionConfig(boxed_match_priority=0),)

    def parse(formula: str) -> Any:
        return math_verify.parse(rf"\boxed{{{formula}}}", config, fallback_mode="no_fallback", parsing_timeout=None)

    return parse, math_verify.verify
