"""Verifier `short_answer`: compare a few words or one quantity with a reference and other accepted answers.

A quantity is compared as a number with its unit, exactly or within metadata.tolerance. Any other text is compared by
its words, with indices, charges and exponents as in plain text: `H_2O` is H2O, `Ca^{2+}` is Ca2+, `x^{2}` is x^2.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.answer_text import plain_number, quote, tidy
from megatron_brorl.rewards.extract import final_answer, given_answer, is_short_line
from megatron_brorl.rewards.verifier import Score, VerifierRow

_INDEX = re.compile(r"\s*_\s*(?:\{([^{}]*)\}|(\w))(?:\s*(?=[A-Z][a-z]?(?![a-z])|[(_^])|(?=\W|\d|$))")
_CHARGE = re.compile(r"\s*\^\s*(?:\{\s*(\d*)\s*([+-])\s*\}|(\d*)([+-])(?![\w({\\]))")
_EXPONENT = re.compile(r"\^\s*\{\s*(-?(?:\d+|[A-Za-z]))\s*\}(?!\d)")  # x^{2y} is not x^2y
_MICRO = re.compile(r"(?<=[\d}])\s*(?:\\mu(?![A-Za-z])|μ)\s*(?=[A-Za-z])")
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_ARTICLE = re.compile(r"\b(?:a|an|the)\b(?=\s+\w)")
_SIGNS = re.compile(r"[^\w+\-*/=<>^.%|]+|(?<!\d)\.|\.(?!\d)|(?<=[^\W\d])-(?=[^\W\d])")


def find(response: str) -> str | None:
    """Return the final answer of a response, or the whole response if it is one short line."""
    return final_answer(response, same, is_short_line)


def same(a: str, b: str) -> bool:
    """Return whether two texts are the same quantity or have the same words."""
    x, y = plain_number(_tidy(a)), plain_number(_tidy(b))
    if x and y:
        return x.equals(y) and (x.unit or {}) == (y.unit or {})
    return words(a) == words(b)


def words(text: str) -> str:
    """Return a text without case, accents, articles, punctuation and LaTeX commands."""
    text = _EXPONENT.sub(r"^\1", _CHARGE.sub(r"\1\2\3\4", _INDEX.sub(r"\1\2", _tidy(text))))
    text = _COMMAND.sub(r"\1", text.replace("\\cdot", " ")).casefold().replace("{", " ").replace("}", " ")
    decomposed = unicodedata.normalize("NFKD", text)
    text = "".join(c for c in decomposed if not unicodedata.combining(c))
    return " ".join(_ARTICLE.sub(" ", _SIGNS.sub(" ", text)).split())


def _tidy(text: str) -> str:
    r"""Return a tidied text without the command of chemical formulas, and with "micro" for the `\mu` of a unit."""
    return _MICRO.sub(" micro", tidy(text).replace("\\ce{", "{"))


def check_row(row: VerifierRow, where: str) -> None:
    """Raise UserError unless there is an accepted answer, and metadata.answers and metadata.tolerance are valid."""
    answers = row["metadata"].get("answers", [])
    if not isinstance(answers, list) or not all(isinstance(answer, str) and answer.strip() for answer in answers):
        raise UserError(f"{where}: metadata.answers must be a list of accepted answers as texts, not {answers!r:.60}")
    accepted = _accepted(row)
    if not accepted:
        raise UserError(f'{where}: verifier "short_answer" needs answer, or metadata.answers with accepted ones')
    for answer in accepted:
        if not plain_number(_tidy(answer)) and not words(answer):
            raise UserError(f"{where}: accepted answer {quote(answer)!r} has neither letters nor digits")

    tolerance = row["metadata"].get("tolerance", 0)
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 <= tolerance < 1:
        raise UserError(f"{where}: metadata.tolerance = {tolerance!r}: the relative error allowed, in [0, 1)")


def verify(answer: str, row: VerifierRow) -> Score:
    """Return 1 if the answer equals one of the accepted answers."""
    final, why = given_answer(answer, same)
    if why:
        return Score(0.0, why)
    tolerance = Fraction(row["metadata"].get("tolerance", 0))
    reasons = [_difference(final, accepted, tolerance) for accepted in _accepted(row)]
    return Score(0.0, reasons[0]) if all(reasons) else Score(1.0)


def _accepted(row: VerifierRow) -> list[str]:
    """Return the answer in the reference, if there is one, and metadata.answers."""
    reference = given_answer(row["answer"] or "", same)[0]
    return [*filter(None, [reference]), *row["metadata"].get("answers", [])]


def _difference(answer: str, accepted: str, tolerance: Fraction) -> str:
    """Return why an answer does not equal an accepted one, or ""."""
    number, expected = plain_number(_tidy(answer)), plain_number(_tidy(accepted))
    if not number or not expected:
        right = words(answer) and words(answer) == words(accepted)
    elif expected.unit and number.unit != expected.unit:  # The answer may have a unit that the reference lacks.
        return f"{quote(answer)} does not have the unit of {quote(accepted)}"
    else:
        right = number.equals(expected, tolerance)
    return "" if right else f"{quote(answer)} is not {quote(accepted)}"
