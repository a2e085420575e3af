r"""Verifier `math`: an answer must be the same number or expression as the reference.

Plain numbers are compared exactly (answer_text.py). Other expressions, such as `\frac{\pi}{4}`, sets, intervals and
matrices, are parsed and compared with sympy (math_values.py). The worker process enforces the time limit.
"""

from __future__ import annotations

import re

from megatron_brorl.errors import UserError, shown
from megatron_brorl.rewards.answer_text import MAX_NUMBER_CHARS, plain_number, plain_text, quote, usual_brackets
from megatron_brorl.rewards.extract import final_answer, given_answer, same_text
from megatron_brorl.rewards.verifier import Score, Verifier, VerifierRow, holds_object

_WORDS = re.compile(r"(?=.*[A-Za-z]{4}|yes|no)[A-Za-z][A-Za-z' -]*", re.IGNORECASE)  # not a product of variables
_LEFT_TO_COMPUTE = re.compile(r"\\(?:sum|prod|i{1,3}nt|oint|lim|limsup|liminf|bigcup|bigcap)(?![a-z])|\\frac\{d\}")

# Patterns of text for which computer algebra takes seconds. Other slow text is stopped by the time limit of the worker.
_MAX_ALGEBRA_CHARS = 1000
_MAX_DEPTH = 20
_POWER = r"(?:\^|\*\*)"
_EXPONENT = _POWER + r"\s*\{[^{}]*"
_SLOW = (
    (re.compile(r"\d{101}"), "a number of more than 100 digits"),
    (re.compile(r"(?:[,&][^,&]*){200}"), "a list or matrix of more than 200 parts"),
    (re.compile(r"\\[dt]?binom\s*(?:\{[^{}]*\}\s*)?\{?[^{}]*\d{5}"), "a large binomial"),
    (re.compile(_POWER + r"\s*[{(]*\s*[-+]?\s*\d{5}"), "a power above the 9999th"),
    (re.compile(rf"{_POWER}\s*\w+\s*{_POWER}|(?:\)\s*{_POWER}\s*\{{?\d+\}}?\s*){{3}}"), "a tower of powers"),
    (re.compile(_EXPONENT + rf"(?:(?:\d|\(\d+\))\s*(?:{_POWER}|!)|{_EXPONENT}{_POWER})"), "a tower of powers"),
    (re.compile(rf"\d{{5}}[\s)}}]*!|![\s)}}]*!|{_POWER}\s*(?:\{{[^{{}}]*\}}|\w)[\s)}}]*!"), "a large factorial"),
)
_OPENED_BY = {"}": "{", ")": "([", "]": "(["}  # half-open intervals have different brackets


def find(response: str) -> str | None:
    """Return the final answer of a response, or the whole response if it is a plain number."""
    return final_answer(response, same, lambda bare: len(bare) <= MAX_NUMBER_CHARS and plain_number(bare) is not None)


def same(a: str, b: str) -> bool:
    """Return whether two answers of a response are the same text or the same plain number."""
    if same_text(a, b):
        return True
    x, y = plain_number(a), plain_number(b)
    return x is not None and y is not None and x.equals(y) and not x.clashes(y)


def check_row(row: VerifierRow, where: str) -> None:
    """Raise UserError unless the reference has one answer: bare, boxed, or after the `####` of GSM8K."""
    reference = row["answer"]
    if not isinstance(reference, str) or not reference.strip():
        raise UserError(f'{where}: verifier "math" needs answer, the reference answer as text')
    if holds_object(reference):
        raise UserError(
            f"{where}: answer is an object with the arguments of a check ({shown(reference, 40)}), not an answer: name "
            "its verifier, or a function of your own (data.verifier)"
        )
    if why := given_answer(reference, same)[1]:
        several = why.partition(": ")[2]
        raise UserError(f'{where}: answer has {several}; keep the one that verifier "math" is to compare')


def verify(answer: str, row: VerifierRow) -> Score:
    """Return 1 if the answer equals the reference. With reward.extract = "full", the answer is a whole response."""
    final, why = given_answer(answer, same)
    why = why or _difference(final, given_answer(row["answer"] or "", same)[0])
    return Score(float(not why), why)


def load() -> Verifier:
    """Return the verifier. Imports sympy first, which takes a second, so that no answer times out."""
    _same_value("1", "0")
    return verify


def slow_part(text: str) -> str:
    """Return why a text is too slow for computer algebra, or ""."""
    if len(text) > _MAX_ALGEBRA_CHARS:
        return f"too long to be an answer: {len(text)} characters, at most {_MAX_ALGEBRA_CHARS}"
    why = next((why for pattern, why in _SLOW if pattern.search(text)), "")
    return why or _unreadable_brackets(text)


def _unreadable_brackets(text: str) -> str:
    opened: list[str] = []
    for bracket in re.findall(r"[{}()\[\]]", text):
        if bracket in "{([":
            opened.append(bracket)
        elif not opened or opened.pop() not in _OPENED_BY[bracket]:
            return "brackets that do not match"
        if len(opened) > _MAX_DEPTH:
            return f"brackets nested deeper than {_MAX_DEPTH}"
    return "brackets that do not match" if opened else ""


def _difference(answer: str, reference: str) -> str:
    """Return why an answer does not equal the reference, or ""."""
    differ = f"{quote(answer)} is not {quote(reference)}"
    number, expected = plain_number(answer), plain_number(reference)
    if number and expected:
        return "" if number.equals(expected) and not number.clashes(expected) else differ
    if same_text(answer, reference):
        return ""
    answer, reference = usual_brackets(answer), usual_brackets(reference)

    # An answer that repeats the integral of the question has the right value, but does not compute it.
    why = slow_part(answer)
    undone = _LEFT_TO_COMPUTE.search(answer)
    if not why and undone and undone[0] not in reference:
        why = f"{undone[0]} is not computed"
    if not why and (slow := slow_part(reference)):
        why = f"the reference is only compared as text: {slow}"
    return why or ("" if _same_value(reference, answer) else differ)


def _same_value(reference: str, answer: str) -> bool:
    """Return whether both texts can be parsed and have equal values."""
    words = plain_text(reference), plain_text(answer)
    if all(map(_WORDS.fullmatch, words)):
        return words[0].casefold() == words[1].casefold()
    from megatron_brorl.rewards.verifiers import math_values  # Only worker processes import sympy.

    try:
        return math_values.same_value(reference, answer)
    except Exception:  # latex2sympy raises many exception types for text that it cannot parse
        return False
