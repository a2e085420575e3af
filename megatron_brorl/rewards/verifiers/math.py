r"""Verifier `math`, which checks whether an answer is the same number or expression as the reference.

Plain numbers are compared exactly (answer_text.py). Other expressions, such as `\frac{\pi}{4}`, sets, intervals and
matrices, are read and compared with sympy (math_values.py). This module sets no timeout, because the scoring process
has one.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.answer_text import MAX_NUMBER_CHARS, plain_number, plain_text, quote, units_clash
from megatron_brorl.rewards.extract import final_answer, given_answer, same_text
from megatron_brorl.rewards.verifier import Score, Verifier, VerifierRow

_WORDS = re.compile(r"(?=.*[A-Za-z]{4}|yes|no)[A-Za-z][A-Za-z' -]*", re.IGNORECASE)  # words, not a product of letters
_LEFT_TO_COMPUTE = re.compile(r"\\(?:sum|prod|i{1,3}nt|oint|lim|limsup|liminf|bigcup|bigcap)(?![a-z])|\\frac\{d\}")

# Text that would take computer algebra seconds. Whatever else is slow costs the scoring process its deadline.
_MAX_ALGEBRA_CHARS, _MAX_DEPTH = 1000, 20
_POWER = r"(?:\^|\*\*)"
_SLOW = (
    (re.compile(r"\d{101}"), "a number of more than 100 digits"),
    (re.compile(r"(?:[,&][^,&]*){200}"), "a list or matrix of more than 200 parts"),
    (re.compile(r"\\[dt]?binom\s*(?:\{[^{}]*\}\s*)?\{?[^{}]*\d{5}"), "a large binomial"),
    (re.compile(_POWER + r"\s*[{(]*\s*[-+]?\s*\d{5}"), "a power above the 9999th"),
    (re.compile(rf"{_POWER}\s*\w+\s*{_POWER}|(?:\)\s*{_POWER}\s*\{{?\d+\}}?\s*){{3}}"), "a tower of powers"),
    (re.compile(rf"\d{{5}}[\s)}}]*!|![\s)}}]*!|{_POWER}\s*(?:\{{[^{{}}]*\}}|\w)[\s)}}]*!"), "a large factorial"),
)
_COMMAND = re.compile(r"\\(?!alpha|beta|gamma|delta|theta|lambda|mu|phi|omega)[A-Za-z]+")
_TOKEN = re.compile(rf"(?P<open>{_POWER}?\s*[{{(\[])|(?P<close>[}})\]])|(?P<grows>{_POWER}|!)")
_PAIRS = {"}": "{", ")": "([", "]": "(["}  # An interval may open with one bracket and close with the other.


def find(response: str) -> str | None:
    """Return the final answer of a response; the whole response if it is only a plain number."""
    return final_answer(response, same, lambda bare: len(bare) <= MAX_NUMBER_CHARS and plain_number(bare) is not None)


def same(a: str, b: str) -> bool:
    """Return whether two places of a response have the same text or the same plain number."""
    if same_text(a, b):
        return True
    x, y = plain_number(a), plain_number(b)
    return x is not None and y is not None and x.equals(y) and not x.clashes(y)


def check_row(row: VerifierRow, where: str) -> None:
    """Raise UserError unless the reference has one answer: bare, boxed, or as a solution of GSM8K with its `####`."""
    reference = row["answer"]
    if not isinstance(reference, str) or not reference.strip():
        raise UserError(f'{where}: verifier "math" needs answer, the reference answer as text')
    why = given_answer(reference, same)[1]
    if why:
        several = why.partition(": ")[2]
        raise UserError(f'{where}: answer has {several}; keep the one that verifier "math" is to compare')


def verify(answer: str, row: VerifierRow) -> Score:
    """Return 1 for an answer equal to the reference. With reward.extract = "full", the answer is a whole response."""
    given, why = given_answer(answer, same)
    why = why or _difference(given, reference_of(row))
    return Score(float(not why), why)


def reference_of(row: VerifierRow) -> str:
    """Return the answer in a row's reference."""
    return given_answer(row["answer"] or "", same)[0]


def load() -> Verifier:
    """Return the verifier after sympy is imported, which takes a second that no answer's deadline should pay."""
    _read("0")
    return verify


def slow_part(text: str) -> str:
    """Return what makes a text too slow for computer algebra, or ""."""
    if len(text) > _MAX_ALGEBRA_CHARS:
        return f"too long to be an answer: {len(text)} characters, at most {_MAX_ALGEBRA_CHARS}"
    why = next((why for pattern, why in _SLOW if pattern.search(text)), "")
    return why or _slow_nesting(text)


def _slow_nesting(text: str) -> str:
    """Return whether brackets do not match or are nested deeply, or an exponent has a power or factorial of numbers."""
    numbers_only = not re.search("[A-Za-z]", _COMMAND.sub("", text))
    opened: list[str] = []  # brackets, with a caret before those of an exponent
    for token in _TOKEN.finditer(text):
        exponents = sum(bracket[0] in "^*" for bracket in opened)
        numeric = numbers_only or text[token.start() - 1].isdigit()
        if (token["grows"] or token[0][0] in "^*") and (exponents > 1 or (exponents and numeric)):
            return "a tower of powers"
        if token["open"]:
            opened.append(token[0])
        elif token["close"] and (not opened or opened.pop()[-1] not in _PAIRS[token[0]]):
            return "brackets that do not match"
        if len(opened) > _MAX_DEPTH:
            return f"brackets nested deeper than {_MAX_DEPTH}"
    return "brackets that do not match" if opened else ""


def _difference(given: str, reference: str) -> str:
    """Return why an answer is not equal to the reference, or ""."""
    differ = f"{quote(given)} is not {quote(reference)}"
    number, wanted = plain_number(given), plain_number(reference)
    if number and wanted:
        return "" if number.equals(wanted) and not number.clashes(wanted) else differ
    if same_text(given, reference):
        return ""

    # An answer that repeats the question's integral has the right value, but leaves the integral to be computed.
    why = slow_part(given)
    undone = _LEFT_TO_COMPUTE.search(given)
    if not why and undone and undone[0] not in reference:
        why = f"{undone[0]} is left to be computed"
    if not why and (slow := slow_part(reference)):
        why = f"the reference is compared as text alone: {slow}"
    return why or ("" if _same_value(reference, given) else differ)


def _same_value(reference: str, given: str) -> bool:
    """Return whether both texts are understood and their values are equal."""
    words = plain_text(reference), plain_text(given)
    if all(map(_WORDS.fullmatch, words)):
        return words[0].casefold() == words[1].casefold()
    from megatron_brorl.rewards.verifiers import math_values  # Only scoring processes need sympy.

    try:
        (wanted, unit), (value, other_unit) = _read(reference), math_values.read(given)
        return not units_clash(unit, other_unit) and math_values.same(wanted, value)
    except Exception:  # latex2sympy raises any exception for a text that it does not understand.
        return False


@functools.lru_cache(maxsize=256)
def _read(reference: str) -> Any:
    from megatron_brorl.rewards.verifiers import math_values

    return math_values.read(reference)
