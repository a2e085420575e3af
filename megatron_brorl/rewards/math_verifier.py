r"""Verifier `math`: is the answer the reference's number, or an expression equal to it?

Plain numbers on both sides are compared exactly (plain_number.py). Everything else, `\frac{\pi}{4}`, sets, intervals,
matrices, is read with latex2sympy (math_values.py) and compared with sympy (math_equal.py). There is no timeout here:
a verifier's process has one.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.final_answer import disagreement, final_answer, places, same_text
from megatron_brorl.rewards.plain_number import MAX_CHARS, equal, names_clash, plain_number, units_clash
from megatron_brorl.rewards.spelling import plain_text, quote
from megatron_brorl.rewards.sympy_guard import refusal, restates
from megatron_brorl.rewards.verifier import Score, Verifier, VerifierRow

_RIGHT = Score(1.0)
_WORDS = re.compile(r"(?=.*[A-Za-z]{4}|yes|no)[A-Za-z][A-Za-z' -]*", re.IGNORECASE)  # a text, no product of letters


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
    return x is not None and y is not None and equal(x, y) and not units_clash(x.unit, y.unit)


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
        clash = units_clash(number.unit, wanted.unit) or names_clash(number.name, wanted.name)
        return _RIGHT if equal(number, wanted) and not clash else differ
    if same_text(given, reference):
        return _RIGHT

    # Refuse what repeats the question, and what is made to be slow, before sympy sees it.
    undone = restates(given, reference)
    why = refusal(given) or (f"{undone} is left to be computed" if undone else "")
    if why:
        return Score(0.0, why)
    why = refusal(reference)
    if why:
        return Score(0.0, f"the reference is compared as text alone: {why}")
    return _RIGHT if _algebra(reference, given) else differ


def reference_of(row: VerifierRow) -> str:
    """The answer in a row's reference."""
    answer = row["answer"] or ""
    said = places(answer)
    return said[-1] if said else answer.strip()


def load() -> Verifier:
    """Return the verifier with sympy imported, so that no answer's deadline pays for the second that it takes."""
    _read("0")
    return verify


def _algebra(reference: str, given: str) -> bool:
    """Whether both texts are understood and their values are equal."""
    words = plain_text(reference), plain_text(given)
    if all(map(_WORDS.fullmatch, words)):
        return words[0].casefold() == words[1].casefold()

    from megatron_brorl.rewards import math_equal, math_values  # sympy is for scoring processes

    try:
        (wanted, unit), (value, other_unit) = _read(reference), math_values.read(given)
        return not units_clash(unit, other_unit) and math_equal.same(wanted, value)
    except Exception:  # latex2sympy raises any exception for a text that it does not understand
        return False


@functools.lru_cache(maxsize=256)
def _read(reference: str) -> Any:
    from megatron_brorl.rewards import math_values

    return math_values.read(reference)
