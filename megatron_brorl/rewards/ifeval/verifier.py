"""Instruction following as IFEval measures it (Zhou et al. 2023, arXiv 2311.07911).

metadata of a row:
    instruction_id_list   the kinds of its instructions
    kwargs                the arguments of each, by name; null stands for one that its kind does not have
    mode                  "strict" (default), or "loose": an instruction also counts as followed where it is after the
                          first line, the last line or the asterisks of Markdown were taken away
    all                   true: the reward is 1 for all instructions and 0 otherwise; false (default): their share
    min_words             a shorter response scores 0 (default 0): some instructions ask for very little
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.extract import after_thought
from megatron_brorl.rewards.ifeval import language
from megatron_brorl.rewards.ifeval.kinds import KINDS
from megatron_brorl.rewards.ifeval.text import count_words
from megatron_brorl.rewards.returned import MOST_PARTS
from megatron_brorl.rewards.verifier import Score, Verifier, VerifierRow

_MODES = ("strict", "loose")


def find(response: str) -> str | None:
    """What follows the last </think>, or all where there is none; None where nothing is left."""
    return after_thought(response).strip() or None


def load() -> Verifier:
    """The verifier, with the profiles of languages read: that takes longer than many answers."""
    language.detected("the profiles are read at the first call")
    return score


def score(answer: str, row: VerifierRow) -> Score:
    """The share of the row's instructions that the answer follows, or whether it follows all; parts: each of them."""
    metadata = row["metadata"]
    if count_words(answer) < metadata.get("min_words", 0):
        return Score(0.0, f"fewer than {metadata['min_words']} words (min_words)")

    # An instruction is followed if it is in any of the readings.
    readings = loose_readings(answer) if metadata.get("mode") == "loose" else [answer]
    parts: dict[str, float] = {}
    for kind, arguments in zip(metadata["instruction_id_list"], metadata["kwargs"], strict=True):
        given = _given(arguments)
        parts[_new_name(kind, parts)] = float(any(follows(kind, given, reading) for reading in readings))

    # Named for a person who looks at a transcript.
    failed = [name for name, part in parts.items() if not part]
    reason = f"not followed: {', '.join(failed)}" if failed else ""
    share = 1 - len(failed) / len(parts)
    return Score(float(not failed) if metadata.get("all") else share, reason, parts)


def follows(kind: str, arguments: Mapping[str, Any], response: str) -> bool:
    """Whether the response follows an instruction of that kind; an empty one follows none."""
    return bool(response.strip()) and KINDS[kind].follows(response, **arguments)


def loose_readings(response: str) -> list[str]:
    """The response, and what of it the published loose accuracy looks at besides: 8 texts, some of them equal."""
    lines = response.split("\n")
    shorter = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    readings = [response, *shorter]
    return list(dict.fromkeys([*readings, *(text.replace("*", "") for text in readings)]))


def check_row(row: VerifierRow, where: str) -> None:
    """Raise UserError unless the metadata name known instructions with arguments that they take."""
    metadata = row["metadata"]

    # Two lists of one length.
    kinds, kwargs = metadata.get("instruction_id_list"), metadata.get("kwargs")
    if not isinstance(kinds, list) or not kinds or not all(isinstance(kind, str) for kind in kinds):
        raise UserError(
            f'{where}: verifier "ifeval" needs metadata.instruction_id_list, a list of instruction ids such as '
            '"punctuation:no_comma"'
        )
    if len(kinds) > MOST_PARTS:
        raise UserError(
            f"{where}: metadata.instruction_id_list has {len(kinds)} instructions, but a reward has at most "
            f"{MOST_PARTS} parts; leave some out"
        )
    if not isinstance(kwargs, list) or len(kwargs) != len(kinds):
        raise UserError(
            f'{where}: verifier "ifeval" needs metadata.kwargs, a list of {len(kinds)} objects, one per instruction'
        )

    # Each instruction with its arguments.
    for place, (kind, arguments) in enumerate(zip(kinds, kwargs, strict=True)):
        _check_instruction(kind, arguments, where, place)

    # How the row is scored.
    mode, every, words = metadata.get("mode", "strict"), metadata.get("all", False), metadata.get("min_words", 0)
    if mode not in _MODES:
        raise UserError(f'{where}: metadata.mode is {mode!r}; use "strict" or "loose"')
    if not isinstance(every, bool):
        raise UserError(f"{where}: metadata.all is {every!r}; use true or false")
    if not isinstance(words, int) or isinstance(words, bool) or words < 0:
        raise UserError(f"{where}: metadata.min_words is {words!r}; use a whole number of at least 0")


def _check_instruction(kind: str, arguments: Any, where: str, place: int) -> None:
    """The instruction at `place` of its row, from 0."""
    # A name that is almost right is worth a hint.
    if kind not in KINDS:
        close = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(KINDS)}"
        raise UserError(f"{where}: metadata.instruction_id_list[{place}]: no instruction is called {kind!r}; {hint}")

    # Every argument of its kind, and no other.
    key, wanted = f"{where}: metadata.kwargs[{place}] ({kind})", KINDS[kind].arguments
    if not isinstance(arguments, dict):
        raise UserError(f"{key} is {arguments!r}; use an object, {{}} for no arguments")
    given = _given(arguments)
    unknown = [name for name in given if name not in wanted]
    if unknown:
        takes = ", ".join(wanted) or "no arguments"
        raise UserError(f"{key} has {unknown[0]!r}, but the instruction takes {takes}; remove it")
    for name, argument in wanted.items():
        if name not in given:
            raise UserError(f"{key} lacks {name!r}, {argument.meaning}; add it")
        if not argument.accepts(given[name]):
            raise UserError(f"{key} has {name} = {given[name]!r}; it must be {argument.meaning}")

    # No paragraph follows the last.
    if given.get("nth_paragraph", 0) > given.get("num_paragraphs", 0):
        raise UserError(f"{key} has nth_paragraph above num_paragraphs, which nothing can follow; lower it")


def _given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Without nulls: files of columns name every argument of every kind."""
    return {name: value for name, value in arguments.items() if value is not None}


def _new_name(kind: str, taken: Mapping[str, float]) -> str:
    """The kind, or "kind#2" and so on where a row has several of a kind."""
    count = sum(name.partition("#")[0] == kind for name in taken)
    return f"{kind}#{count + 1}" if count else kind
