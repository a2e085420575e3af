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

UNKNOWN = "?"  # a column that the user has to name
_MISSING = object()
KEYS = ("prompt", "answer", "target", "verifier", "id", "metadata")  # of a row

# Names of columns in published data sets, the most common first.
_PROMPTS = ("prompt", "question", "problem", "messages", "instruction", "input", "query")
_ANSWERS: tuple[str, ...] = ("answer", "final_answer", "expected_answer", "solution", "reference", "ground_truth")
_ANSWERS += ("reward_model.ground_truth", "label")


def map_columns(raw: dict[str, Any], columns: ColumnsConfig, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a row with this project's keys and "task", and the remaining columns.

    The remaining columns include that of the task, and columns of which a key reads a part ("a.b"). If data.columns
    names no column, the row keeps all of its keys, and no columns remain. Finite numbers as answer, target, id or
    task become text. Raises UserError if a named column or a match of answer_regex is missing.
    """
    is_mapped = columns != ColumnsConfig()
    row: dict[str, Any] = {} if is_mapped else dict(raw)
    others = dict(raw) if is_mapped else {}
    keys = (*KEYS, "task") if is_mapped else ()
    for key in keys:
        name = getattr(columns, key, "")  # identifiers, verifiers and metadata cannot be renamed
        value = _find(raw, name or key)
        # A column that data.columns names must be in every row, although it may be null. Others may be missing.
        if name and value is _MISSING:
            raise UserError(f"{where}: data.columns.{key} = {name!r}: there is no such column, only {', '.join(raw)}")
        # A column that data.columns does not name can match a key by chance. So "task" is read only by name (rows of
        # this project use metadata.task instead), and so is an answer or target that is a boolean, list or object.
        needs_name = key == "task" or (key in ("answer", "target") and isinstance(value, (bool, list, dict)))
        is_read = value is not _MISSING and (name != "" or not needs_name)
        row[key] = value if is_read else None
        if is_read and key != "task":
            others.pop(name or key, None)
    if isinstance(row.get("task"), bool):
        row["task"] = str(row["task"]).lower()
    for key in ("answer", "target", "id", "task"):
        value = row.get(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            row[key] = str(int(value)) if value == int(value) else str(value)
    if columns.answer_regex and isinstance(row["answer"], str):
        answer = _matched(columns.answer_regex, row["answer"], where)
        # The whole column, a worked answer, is the target of supervised training.
        row |= {"answer": answer, "target": row["answer"] if row["target"] is None else row["target"]}
    return row, others


@dataclass(frozen=True)
class Guess:
    """The content of a file, guessed from its first row."""

    columns: dict[str, str]  # data.columns; {} if the file has this project's keys
    others: list[str]  # columns that only functions of the user receive
    is_chat: bool  # the prompt is a list of messages
    is_scored: bool  # the row has a reference or names its verifier


def guess_columns(path: Path, named: Mapping[str, str]) -> Guess:
    """Guess the content of a file. named: names of columns by key, prompt, answer or task.

    The prompt is UNKNOWN if no column looks like one. Raises UserError if the file or a named column cannot be read.
    """
    number, raw = next(raw_rows(path), (0, None))
    where = f"{path.absolute()}:{number}"
    row = parse_row(raw, where)
    if not isinstance(row, dict):
        raise UserError(f"{path.absolute()}: has no row that is an object")
    for key, name in named.items():
        if _find(row, name) is _MISSING:
            raise UserError(f"{where}: --{key} {name}: there is no such column, only {', '.join(row)}")
    prompts = (name for name in _PROMPTS if row.get(name) and isinstance(row[name], (str, list)))
    prompt = named.get("prompt") or next(prompts, UNKNOWN)
    answers = (name for name in _ANSWERS if name != prompt and _find(row, name) not in (_MISSING, None))
    answer = named.get("answer") or next(answers, "")
    reference = _find(row, answer)
    if "answer" not in named and (isinstance(reference, (bool, list)) or holds_object(reference) or reference == ""):
        answer = ""

    columns = {"prompt": prompt, **({"answer": answer} if answer else {}), **named}
    unread = {} if prompt == UNKNOWN else map_columns(row, ColumnsConfig(**columns), where)[1]
    others = [name for name, value in unread.items() if value is not None]
    if not others and columns.items() <= {("prompt", "prompt"), ("answer", "answer")}:
        columns = {}  # The file has this project's keys.
    elif re.search("#### .", str(row.get(answer))):  # GSM8K
        columns["answer_regex"] = "#### (.+)"
    # A last message of the assistant is the answer.
    messages = _find(row, prompt)
    is_chat = isinstance(messages, list) and bool(messages)
    answered = is_chat and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant"
    is_scored = bool(answer or row.get("target") or row.get("verifier") or answered)
    return Guess(columns, others, is_chat, is_scored)


def _matched(regex: str, text: str, where: str) -> str:
    """Return the first group of the last match, or the whole match. Worked answers end with the result."""
    try:
        pattern = re.compile(regex, re.DOTALL)
    except re.error as e:
        raise UserError(f"data.columns.answer_regex = {regex!r}: not a regular expression: {e}") from None
    matches = list(pattern.finditer(text))
    if not matches:
        raise UserError(f"{where}: the answer has no match of data.columns.answer_regex = {regex!r}")
    return ((matches[-1][1] if pattern.groups else matches[-1][0]) or "").strip()


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
