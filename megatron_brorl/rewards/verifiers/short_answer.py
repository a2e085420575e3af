"""Verifier `short_answer`: a few words or one quantity, against a reference and other accepted answers.

A quantity is compared as a number with its unit, exactly or within metadata.tolerance. Everything else is compared as
text without case, articles, punctuation and LaTeX commands. Synonyms, paraphrases and chemistry are not understood, and
no unit is converted: a right answer in other words scores 0.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator
from fractions import Fraction

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.answer_text import quote, tidy
from megatron_brorl.rewards.final_answer import disagreement, final_or_bare_answer, places
from megatron_brorl.rewards.plain_number import PlainNumber, equal, plain_number
from megatron_brorl.rewards.verifier import Score, VerifierRow

_MAX_CHARS = 300  # A longer response is not a bare answer.
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_ARTICLE = re.compile(r"\b(?:a|an|the)\b(?=\s+\w)")
_SIGNS = re.compile(r"[^\w+\-*/=<>^.%]+|(?<!\d)\.|\.(?!\d)|(?<=[^\W\d])-(?=[^\W\d])")


def find(response: str) -> str | None:
    """Return the final answer of a response, or the whole response if it is one short line."""
    return final_or_bare_answer(response, same, _MAX_CHARS)


def same(a: str, b: str) -> bool:
    """Return whether two texts are the same quantity, or the same text after `words`."""
    x, y = plain_number(a), plain_number(b)
    if x and y:
        return equal(x, y) and (x.unit or {}) == (y.unit or {})
    return words(a) == words(b)


def words(text: str) -> str:
    """Return a text without case, accents, articles, punctuation and LaTeX commands."""
    text = _COMMAND.sub(r"\1", tidy(text)).casefold().replace("{", " ").replace("}", " ")
    decomposed = unicodedata.normalize("NFKD", text)
    text = "".join(c for c in decomposed if not unicodedata.combining(c))
    return " ".join(_ARTICLE.sub(" ", _SIGNS.sub(" ", text)).split())


def check_row(row: VerifierRow, where: str) -> None:
    """Raise UserError unless there is a reference, and metadata.answers and metadata.tolerance are valid."""
    answers = row["metadata"].get("answers", [])
    if not isinstance(answers, list) or not all(isinstance(answer, str) and answer.strip() for answer in answers):
        raise UserError(f"{where}: metadata.answers must be a list of accepted answers as texts, not {answers!r:.60}")
    if not (row["answer"] or "").strip() and not answers:
        raise UserError(f'{where}: verifier "short_answer" needs answer, or metadata.answers with accepted ones')
    for answer in _accepted(row):
        if not plain_number(answer) and not words(answer):
            raise UserError(f"{where}: accepted answer {quote(answer)!r} has neither letters nor digits")

    tolerance = row["metadata"].get("tolerance", 0)
    number = isinstance(tolerance, (int, float)) and not isinstance(tolerance, bool)
    if not number or not math.isfinite(tolerance) or not 0 <= tolerance < 1:
        raise UserError(f"{where}: metadata.tolerance = {tolerance!r}: the relative error allowed, in [0, 1)")


def verify(answer: str, row: VerifierRow) -> Score:
    """Return 1 for an answer equal to one of the accepted answers."""
    said = places(answer) or [answer.strip()]
    why = disagreement(said, same)
    if why:
        return Score(0.0, why)
    given, number = said[-1], plain_number(said[-1])

    reasons = []
    tolerance = Fraction(row["metadata"].get("tolerance", 0))
    for accepted in _accepted(row):
        wanted = plain_number(accepted)
        if number and wanted:
            reason = _difference(number, wanted, tolerance)
        else:
            reason = "" if words(given) and words(given) == words(accepted) else "is not"
        if not reason:
            return Score(1.0)
        reasons.append(f"{quote(given)} {reason} {quote(accepted)}")
    return Score(0.0, reasons[0] if reasons else "no accepted answer")


def _accepted(row: VerifierRow) -> Iterator[str]:
    """Yield the answer of the reference, then the others."""
    reference = (row["answer"] or "").strip()
    if reference:
        said = places(reference)
        yield said[-1] if said else reference
    yield from row["metadata"].get("answers", [])


def _difference(number: PlainNumber, wanted: PlainNumber, tolerance: Fraction) -> str:
    """Return how two quantities differ, or "" if they are equal within the relative tolerance."""
    # An answer may have a unit that the reference lacks, not the other way round.
    if wanted.unit and number.unit != wanted.unit:
        return "does not have the unit of"
    if equal(number, wanted):
        return ""

    # 10% is compared with 0.1 and with 10.
    value, target = number.value, wanted.value
    targets = [target]
    if number.percent and not wanted.percent:
        targets.append(100 * target)
    if wanted.percent and not number.percent:
        targets.append(target / 100)
    return "" if any(abs(value - t) <= tolerance * abs(t) for t in targets) else "is not"
