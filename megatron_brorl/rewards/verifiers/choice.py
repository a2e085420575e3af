"""Verifier `choice`: multiple choice, answered by a letter in any common notation or by the text of an option.

docs/verifiers_math.md lists the notations.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.answer_text import plain_text, quote, tidy
from megatron_brorl.rewards.extract import final_answer, is_short_line, places
from megatron_brorl.rewards.verifier import Score, VerifierRow

_LETTERS = "ABCDEFGHIJ"
# A letter in brackets or before a full stop, in either case, or a capital letter at the end or before a reason.
_MARKED_LETTER = re.compile(
    r"(?:(?:the )?(?:option|choice|letter|answer)\s*:?\s*)?"
    r"(?:[(\[]\s*(?P<a>[A-Ja-j])\s*[)\]][.:]?|(?P<b>[A-Ja-j])\s*[).:](?!\w)|(?P<c>[A-J])(?=\s*[,;-]|\s*$)|(?P<d>[a-j])$)",
    re.IGNORECASE,
)
_BARE_LETTER = re.compile(
    r"(?:(?:the )?(?:option|choice|letter|answer)\s*:?\s*)?([A-J])(?:\s+(?![=<>+*/^])(?P<text>.*))?$", re.DOTALL
)
_REASON = re.compile(r"[,;]?\s*\b(?:because|since|as|which|for the reason|due to)\b.*", re.IGNORECASE | re.DOTALL)
# A text that only names several options, and the letter of an option in the words after an answer.
_SEVERAL = re.compile(r"(?:\b(?:[A-J]{1,5}|[a-j]|(?i:and|or|not|both|either|neither|nor|options?|choices?))\b|[\W_])+")
_OTHER = re.compile(r"[(\[]\s*([A-Ja-j])\s*[)\]]|(?<![\w'])([B-HJ])(?![\w'])|(?<![\w'])([AI])(?=\s*(?:[.,;:)]|$))")


def find(response: str) -> str | None:
    """Return the final answer of a response, or the whole response if it is one short line."""
    return final_answer(response, same, is_short_line, _names_options)


def same(a: str, b: str) -> bool:
    """Return whether two texts name the same letter or, without letters, are the same text."""
    x, y = _letter(a)[0], _letter(b)[0]
    return x == y if x or y else _normal(a) == _normal(b)


def check_row(row: VerifierRow, where: str) -> None:
    """Raise UserError unless the reference is a letter and, with metadata.choices, the letter of an option."""
    choices = row["metadata"].get("choices")
    if choices is not None:
        if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
            raise UserError(f"{where}: metadata.choices must be a list of the options' texts, not {choices!r:.60}")
        if not 2 <= len(choices) <= len(_LETTERS):
            raise UserError(f"{where}: metadata.choices has {len(choices)} options; 2 to {len(_LETTERS)} have letters")
    reference = row["answer"] or ""
    right = _chosen(reference, choices or ())
    if not right:
        raise UserError(f'{where}: verifier "choice" needs a letter from A to J as answer, not {quote(reference)!r}')
    if choices and _LETTERS.index(right) >= len(choices):
        raise UserError(f"{where}: answer is {right}, but metadata.choices has {len(choices)} options")


def verify(answer: str, row: VerifierRow) -> Score:
    """Return 1 for the letter of the reference, or for the text of that option in metadata.choices."""
    choices = row["metadata"].get("choices") or ()
    right = _chosen(row["answer"] or "", choices)

    # A response may state its answer several times. All of them must agree.
    texts = [_normal(choice) for choice in choices]
    answers = places(answer, lambda text: _names_options(text) or _normal(text) in texts) or [answer]
    letters = {_chosen(text, choices) for text in answers}
    letter = letters.pop() if len(letters) == 1 else ""
    if not letter:
        return Score(0.0, f"no answer: no single option in {quote(', '.join(answers))}")
    return Score(1.0) if letter == right else Score(0.0, f"{letter} is not {right}")


def _chosen(text: str, choices: Sequence[str]) -> str:
    """Return the letter of an answer, or "" if there is none or it comes with the text of another option."""
    options = [_normal(choice) for choice in choices]
    whole = _normal(text)
    if options.count(whole) == 1:
        return _LETTERS[options.index(whole)]
    letter, behind = _letter(text)
    other = _normal(behind)
    return letter if other not in options or letter == _LETTERS[options.index(other)] else ""


def _names_options(text: str) -> bool:
    """Return whether a text names one or several options. A text such as `42` names none and is skipped."""
    return is_short_line(text) and bool(_letter(text)[0] or _SEVERAL.fullmatch(tidy(text)))


def _letter(text: str) -> tuple[str, str]:
    """Return the letter at the start of a text and the rest, or ("", "") if the rest names another letter."""
    text = _REASON.sub("", " ".join(tidy(text).split()))
    marked = _MARKED_LETTER.match(text)
    if marked:
        letter = next(part for part in marked.groups() if part).upper()
        behind = text[marked.end() :]
    else:
        bare = _BARE_LETTER.match(text)
        if not bare or (bare["text"] and bare[1] in "AI"):  # "A dog" does not name option A
            return "", ""
        letter = bare[1].upper()
        behind = bare["text"] or ""
    others = {next(part for part in match.groups() if part).upper() for match in _OTHER.finditer(behind)}
    return (letter, behind.strip()) if others <= {letter} else ("", "")


def _normal(text: str) -> str:
    return plain_text(text).casefold()
