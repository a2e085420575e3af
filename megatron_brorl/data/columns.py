"""Map the columns of a file to the keys of this project's rows, as data.columns says."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_brorl.config.schema import ColumnsConfig
from megatron_brorl.data.readers import parse_row, raw_rows
from megatron_brorl.errors import UserError
from megatron_brorl.rewards.verifier import holds_object

_MISSING = object()
KEYS = ("prompt", "answer", "target", "verifier", "id", "metadata")  # of a row

# Names of columns in published data sets, the most common first.
_PROMPTS = ("prompt", "question", "problem", "messages", "instruction", "input", "query")
_ANSWERS: tuple[str, ...] = ("answer", "final_answer", "expected_answer", "solution", "reference", "ground_truth")
_ANSWERS += ("reward_model.ground_truth", "label")


def map_columns(raw: Any, columns: ColumnsConfig, where: str) -> Any:
    """Return a row with this project's keys. If data.columns names no column, the row keeps all of its keys.

    Finite numbers as answer, target or id become text. Raises UserError if a named column is missing, or if the answer
    does not match answer_regex.
    """
    if not isinstance(raw, dict):
        return raw
    is_mapped = columns != ColumnsConfig()
    row: dict[str, Any] = {} if is_mapped else dict(raw)
    for key in KEYS if is_mapped else ():
        name = getattr(columns, key)
        value = _find(raw, name or key)
        # A named column must be in every row, although it may be null. Others may be missing.
        if name and value is _MISSING:
            raise UserError(f"{where}: data.columns.{key} = {name!r}: there is no such column, only {', '.join(raw)}")
        row[key] = None if value is _MISSING else value
    for key in ("answer", "target", "id"):
        value = row.get(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            row[key] = str(int(value)) if value == int(value) else str(value)
    if columns.answer_regex and isinstance(row["answer"], str):
        answer = _matched(columns.answer_regex, row["answer"], where)
        # The whole column, a worked answer, is the target of supervised training.
        row |= {"answer": answer, "target": row["answer"] if row["target"] is None else row["target"]}
    return row


@dataclass(frozen=True)
class Guess:
    """The content of a file, guessed from its first row."""

    columns: dict[str, str]  # data.columns; {} if the file has this project's keys
    ignored: list[str]  # columns that are not read
    is_chat: bool  # the prompt is a list of messages
    is_scored: bool  # the row has a reference or names its verifier


def guess_columns(path: Path) -> Guess:
    """Guess the content of a file. Raises UserError if it cannot be read, or if no column looks like a prompt."""
    number, raw = next(raw_rows(path), (0, None))
    row = parse_row(raw, f"{path.absolute()}:{number}")
    if not isinstance(row, dict):
        raise UserError(f"{path.absolute()}: has no row that is an object")
    prompt = next((name for name in _PROMPTS if row.get(name)), None)
    if prompt is None:
        raise UserError(f"{path.absolute()}: no column looks like a prompt, only {', '.join(row)}; set data.columns")
    answer = next((name for name in _ANSWERS if _find(row, name) not in (_MISSING, None)), "")
    if holds_object(_find(row, answer)):
        answer = ""
    others = [key for key, value in row.items() if key not in KEYS and value is not None]

    columns = {}
    if prompt != "prompt" or answer not in ("", "answer") or others:
        columns = {"prompt": prompt, **({"answer": answer} if answer else {})}
        if "####" in str(row.get(answer)):  # GSM8K
            columns["answer_regex"] = "#### (.+)"
    # A column of which one key is read does not count as ignored.
    ignored = [name for name in others if name not in (prompt, answer, answer.partition(".")[0])]
    # A last message of the assistant is the answer.
    messages = row[prompt] if isinstance(row[prompt], list) else []
    answered = bool(messages) and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant"
    is_scored = bool(answer or row.get("target") or row.get("verifier") or answered)
    return Guess(columns, ignored, bool(messages), is_scored)


def _matched(regex: str, text: str, where: str) -> str:
    """Return the first group of the last match, or the whole match. Worked answers end with the result."""
    try:
        pattern = re.compile(regex, re.DOTALL)
    except re.error as e:
        raise UserError(f"data.columns.answer_regex = {regex!r}: not a regular expression: {e}") from None
    found = list(pattern.finditer(text))
    if not found:
        raise UserError(f"{where}: the answer has no match of data.columns.answer_regex = {regex!r}")
    return ((found[-1][1] if pattern.groups else found[-1][0]) or "").strip()


def _find(row: Mapping[str, Any], name: str) -> Any:
    """Return a column, or for "a.b" the key b of column a; _MISSING if there is none.

    If column a is null, so are all of its keys.
    """
    if name in row:
        return row[name]
    column, _, rest = name.partition(".")
    inner = row.get(column, _MISSING) if rest else _MISSING
    if isinstance(inner, Mapping):
        return _find(inner, rest)
    return None if inner is None else _MISSING
