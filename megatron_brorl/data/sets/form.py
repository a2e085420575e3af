"""What the mapping of a published data set is: a function of one of its rows to a task, and what a data card says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_brorl.errors import UserError

Raw = Mapping[str, Any]  # a row by column, as its publisher wrote it


class Unusable(Exception):
    """A row that is as published and yet no task: counted by its reason, not an error."""


@dataclass(frozen=True)
class Task:
    """What a mapping makes of a row."""

    problem: str  # without the words that ask for a form of the answer
    answer: str | None
    verifier: str  # "" = the default of the rows
    metadata: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""  # as published; "" = made of the text
    messages: list[dict[str, str]] | None = None  # a conversation instead of the problem alone


@dataclass(frozen=True)
class DataSet:
    """A published set."""

    about: str
    home: str  # where it is published
    licence: str
    convert: Callable[[Raw, str], Task]  # (row, file:row); raises Unusable, or UserError where the layout is another
    evaluation: bool = False  # meant for evaluation: not to be trained on


def text(raw: Raw, where: str, *names: str) -> str:
    """The text in the first of the columns that the row has. Raises UserError where it has none of them."""
    name = next((name for name in names if raw.get(name) is not None), None)
    if name is None:
        known = ", ".join(map(repr, raw))
        wanted = " or ".join(map(repr, names))
        raise UserError(f"{where}: there is no column {wanted}, only {known}; is it another set, or another version?")
    if not isinstance(raw[name], str):
        raise UserError(f"{where}: column {name!r} must be text, not {type(raw[name]).__name__}")
    return str(raw[name])


def plain(raw: Raw, where: str, *names: str) -> str:
    """As text; a number counts as what it is written as. White space at the ends is cut off."""
    name = next((name for name in names if raw.get(name) is not None), names[0])
    value = raw.get(name)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(int(value)) if value == int(value) else str(value)
    return text(raw, where, *names).strip()


def listed(raw: Raw, where: str, name: str) -> list[Any]:
    """The list in a column. Raises UserError where there is none."""
    value = raw.get(name)
    if not isinstance(value, list):
        raise UserError(f"{where}: column {name!r} must be a list, not {type(value).__name__}; is it another set?")
    return value


def nested(raw: Raw, where: str, name: str, key: str) -> Any:
    """What a column that is an object has under a key. Raises UserError where there is none."""
    value = raw.get(name)
    if not isinstance(value, Mapping) or value.get(key) is None:
        raise UserError(f"{where}: column {name!r} must be an object with {key!r}; is it another set?")
    return value[key]


def last_message(raw: Raw, where: str, name: str) -> str:
    """The text of the user's last message in a column of messages."""
    for message in reversed(listed(raw, where, name)):
        if isinstance(message, Mapping) and message.get("role") == "user":
            return text(message, f"{where}: column {name!r}", "content")
    raise UserError(f"{where}: column {name!r} has no message of the role 'user'; is it another set?")
