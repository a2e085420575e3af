"""Files that have other columns than this project's rows: data.columns says which is what."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_brorl.config.schema import ColumnsConfig
from megatron_brorl.data.files import parse_row, raw_rows
from megatron_brorl.errors import UserError

KEYS = ("prompt", "answer", "target", "verifier", "id", "metadata")  # of a row

# Names that published sets use, the likeliest first.
_PROMPTS = ("prompt", "question", "problem", "messages", "instruction", "input", "query")
_ANSWERS = ("answer", "final_answer", "solution", "reference", "ground_truth", "reward_model.ground_truth", "label")


def mapped(raw: Any, columns: ColumnsConfig, where: str) -> Any:
    """A row by this project's names; as it is where no column is named.

    Raises UserError where a column that is named is not there, or the answer has no match of answer_regex.
    """
    if columns == ColumnsConfig() or not isinstance(raw, dict):
        return raw
    row: dict[str, Any] = {}
    for key in KEYS:
        name = getattr(columns, key)
        # A column that is named must be in every row, if only with null; the others may be missing.
        if name and not _has(raw, name):
            raise UserError(f"{where}: data.columns.{key} = {name!r}: there is no such column, only {', '.join(raw)}")
        row[key] = _at(raw, name or key)

    # Numbers are answers as they are written.
    for key in ("answer", "target", "id"):
        value = row[key]
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            row[key] = str(int(value)) if value == int(value) else str(value)
    if columns.answer_regex and isinstance(row["answer"], str):
        found = last_match(compiled(columns.answer_regex, "data.columns.answer_regex"), row["answer"])
        if found is None:
            raise UserError(f"{where}: the answer has no match of data.columns.answer_regex = {columns.answer_regex!r}")
        # The worked answer is what there is to imitate.
        row["target"] = row["target"] if row["target"] is not None else row["answer"]
        row["answer"] = found
    return row


def compiled(regex: str, key: str) -> re.Pattern[str]:
    """A regular expression of the user's, whose dot is any character. Raises UserError naming `key`."""
    try:
        return re.compile(regex, re.DOTALL)
    except re.error as e:
        raise UserError(f"{key} {regex!r}: not a regular expression: {e}") from None


def last_match(regex: re.Pattern[str], text: str) -> str | None:
    """The first group, or all, of the last match: worked answers end with the result. None where there is none."""
    found = list(regex.finditer(text))
    if not found:
        return None
    return ((found[-1][1] if regex.groups else found[-1][0]) or "").strip()


def guess(path: Path) -> dict[str, str]:
    """The named columns of a file's first row that look like data.columns; none where it is in this project's form.

    Raises UserError where the file cannot be read, or no column looks like a prompt.
    """
    number, raw = next(raw_rows(path), (0, None))
    row = parse_row(raw, f"{path.absolute()}:{number}")
    if not isinstance(row, dict):
        raise UserError(f"{path.absolute()}: has no row that is an object")

    # Its own form has nothing beside its keys.
    prompt = next((name for name in _PROMPTS if _at(row, name)), None)
    if prompt is None:
        raise UserError(f"{path.absolute()}: no column looks like a prompt, only {', '.join(row)}; set data.columns")
    answer = next((name for name in _ANSWERS if _at(row, name) is not None), "")
    others = [key for key, value in row.items() if key not in KEYS and value is not None]
    if prompt == "prompt" and answer in ("", "answer") and not others:
        return {}

    columns = {"prompt": prompt, "answer": answer}
    if "####" in str(_at(row, answer)):
        columns["answer_regex"] = "#### (.+)"  # as in GSM8K
    return {key: name for key, name in columns.items() if name}


def _at(row: Mapping[str, Any], name: str) -> Any:
    """A column, or what a column that is an object has under the rest of the name; None where there is none."""
    if name in row:
        return row[name]
    column, _, rest = name.partition(".")
    inner = row.get(column)
    return _at(inner, rest) if rest and isinstance(inner, Mapping) else None


def _has(row: Mapping[str, Any], name: str) -> bool:
    """Whether a row has the column that _at looks for; null in the place of an object may stand for any of its keys."""
    if name in row:
        return True
    column, _, rest = name.partition(".")
    if not rest or column not in row:
        return False
    return row[column] is None or (isinstance(row[column], Mapping) and _has(row[column], rest))
