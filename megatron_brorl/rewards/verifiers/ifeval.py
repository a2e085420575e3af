"""Verifier `ifeval`: how many of a row's instructions a response follows, by the checks of IFEval.

metadata of a row:
    instruction_id_list   ids of the instructions
    kwargs                the arguments of each, by name; null stands for an argument that is not there
    mode                  "strict" (default), or "loose": an instruction also counts as followed without the first
                          line, the last line, or the asterisks of Markdown
    all                   true: the reward is 1 if all instructions are followed, else 0; false (default): their share
    min_words             a shorter response scores 0 (default 0), because some instructions ask for very little
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.extract import after_thought
from megatron_brorl.rewards.verifier import MOST_PARTS, Score, Verifier, VerifierRow
from megatron_brorl.rewards.verifiers.ifeval_checks import (
    AT_LEAST,
    CHECKS,
    LANGUAGES,
    LESS_THAN,
    count_words,
    detected_language,
)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


# A condition on the values of each argument, and the condition in words.
_Condition = tuple[Callable[[Any], bool], str]
_COUNT: _Condition = (_is_count, "a whole number of at least 0")
_ORDINAL: _Condition = (lambda v: _is_count(v) and v > 0, "a whole number of at least 1")
_TEXT: _Condition = (_is_text, "a string that is not empty")
_TEXTS: _Condition = (lambda v: isinstance(v, list) and bool(v) and all(map(_is_text, v)), "a list of strings")
_RELATION: _Condition = (lambda v: v in (AT_LEAST, LESS_THAN), f'"{AT_LEAST}" or "{LESS_THAN}"')
_CONDITIONS: Mapping[str, _Condition] = {
    **dict.fromkeys(("relation", "let_relation", "capital_relation"), _RELATION),
    **dict.fromkeys(("num_paragraphs", "nth_paragraph"), _ORDINAL),
    **dict.fromkeys(("keywords", "forbidden_words"), _TEXTS),
    **dict.fromkeys(("keyword", "first_word", "postscript_marker", "section_spliter", "prompt_to_repeat"), _TEXT),
    "end_phrase": _TEXT,
    "letter": (lambda v: _is_text(v) and len(v) == 1, "one character"),
    "language": (lambda v: isinstance(v, str) and v in LANGUAGES, f"one of {' '.join(sorted(LANGUAGES))}"),
}


def find(response: str) -> str | None:
    """Return what follows the last </think>; None if that is empty."""
    return after_thought(response).strip() or None


def load() -> Verifier:
    """Return the verifier after langdetect has read its profiles, which takes longer than many answers."""
    detected_language("the profiles are read at the first call")
    return score


def score(answer: str, row: VerifierRow) -> Score:
    """Return the share of the row's instructions that the answer follows, with a part for each."""
    metadata = row["metadata"]
    if count_words(answer) < metadata.get("min_words", 0):
        return Score(0.0, f"fewer than {metadata['min_words']} words (min_words)")

    readings = loose_readings(answer) if metadata.get("mode") == "loose" else [answer]
    parts: dict[str, float] = {}
    for kind, arguments in zip(metadata["instruction_id_list"], metadata["kwargs"], strict=True):
        count = sum(name.partition("#")[0] == kind for name in parts)
        name = f"{kind}#{count + 1}" if count else kind
        parts[name] = float(any(follows(kind, _given(arguments), reading) for reading in readings))

    failed = [name for name, part in parts.items() if not part]
    reason = f"not followed: {', '.join(failed)}" if failed else ""
    return Score(float(not failed) if metadata.get("all") else 1 - len(failed) / len(parts), reason, parts)


def follows(kind: str, arguments: Mapping[str, Any], response: str) -> bool:
    """Return whether a response follows one instruction. An empty response follows none."""
    return bool(response.strip()) and CHECKS[kind](response, **arguments)


def loose_readings(response: str) -> list[str]:
    """Return the response and the variants of it that the published loose accuracy accepts."""
    lines = response.split("\n")
    readings = [response, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return list(dict.fromkeys([*readings, *(text.replace("*", "") for text in readings)]))


def check_row(row: VerifierRow, where: str) -> None:
    """Raise UserError unless the metadata name known instructions with arguments that they take."""
    metadata = row["metadata"]
    kinds, kwargs = metadata.get("instruction_id_list"), metadata.get("kwargs")
    if not isinstance(kinds, list) or not kinds or not all(isinstance(kind, str) for kind in kinds):
        raise UserError(
            f'{where}: verifier "ifeval" needs metadata.instruction_id_list, a list of instruction ids such as '
            '"punctuation:no_comma"'
        )
    if len(kinds) > MOST_PARTS:
        raise UserError(
            f"{where}: metadata.instruction_id_list has {len(kinds)} instructions, but a reward has at most "
            f"{MOST_PARTS} parts; remove some"
        )
    if not isinstance(kwargs, list) or len(kwargs) != len(kinds):
        raise UserError(
            f'{where}: verifier "ifeval" needs metadata.kwargs, a list of {len(kinds)} objects, one per instruction'
        )
    for place, (kind, arguments) in enumerate(zip(kinds, kwargs, strict=True)):
        _check_instruction(kind, arguments, where, place)

    mode, every, words = metadata.get("mode", "strict"), metadata.get("all", False), metadata.get("min_words", 0)
    if mode not in ("strict", "loose"):
        raise UserError(f'{where}: metadata.mode is {mode!r}; use "strict" or "loose"')
    if not isinstance(every, bool):
        raise UserError(f"{where}: metadata.all is {every!r}; use true or false")
    if not _is_count(words):
        raise UserError(f"{where}: metadata.min_words is {words!r}; use {_COUNT[1]}")


def _check_instruction(kind: str, arguments: Any, where: str, place: int) -> None:
    if kind not in CHECKS:
        close = difflib.get_close_matches(kind, CHECKS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(CHECKS)}"
        raise UserError(f"{where}: metadata.instruction_id_list[{place}]: no instruction is called {kind!r}; {hint}")

    key = f"{where}: metadata.kwargs[{place}] ({kind})"
    if not isinstance(arguments, dict):
        raise UserError(f"{key} is {arguments!r}; use an object, {{}} for no arguments")
    given, wanted = _given(arguments), list(inspect.signature(CHECKS[kind]).parameters)[1:]
    unknown = [name for name in given if name not in wanted]
    if unknown:
        takes = ", ".join(wanted) or "no arguments"
        raise UserError(f"{key} has {unknown[0]!r}, but the instruction takes {takes}; remove it")
    for name in wanted:
        accepts, meaning = _CONDITIONS.get(name, _COUNT)
        if name not in given:
            raise UserError(f"{key} lacks {name!r}, {meaning}; add it")
        if not accepts(given[name]):
            raise UserError(f"{key} has {name} = {given[name]!r}; it must be {meaning}")
    if given.get("nth_paragraph", 0) > given.get("num_paragraphs", 0):
        raise UserError(f"{key} has nth_paragraph above num_paragraphs, which nothing can follow; lower it")


def _given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Remove nulls, because files with columns name every argument of every instruction."""
    return {name: value for name, value in arguments.items() if value is not None}
