"""A run's configuration from a TOML file and `section.key=value` overrides, with messages that name file and key.

Rules that need the model or the number of ranks are checked where those are known (parallel.grid, models.gpt).
"""

from __future__ import annotations

import difflib
import functools
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megatron_brorl.config.foreign_keys import foreign_key_hint
from megatron_brorl.config.rules import check
from megatron_brorl.config.schema import Config
from megatron_brorl.errors import UserError, shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, apply `section.key=value` overrides and check the result.

    Raises UserError that names the file and the first key that is unknown, mistyped or out of range.
    """
    path = Path(path).absolute()  # absolute, because messages are read in logs
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such configuration file") from None
    except (ValueError, RecursionError) as e:  # invalid UTF-8, syntax or nesting
        raise UserError(f"{path}: not valid TOML: {shown(e)}") from None
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror}") from None
    return load_table(table, str(path), overrides)


def load_table(table: dict[str, Any], where: str, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of a table as TOML makes it. Changes the table.

    where: the name of the table in messages. Raises UserError that names it and the first wrong key.
    """
    for item in overrides:
        _override(table, item)
    try:
        # As JSON, because strict validation of Python objects accepts no list for a tuple. Dates become text.
        config = TypeAdapter(Config).validate_json(json.dumps(table, default=str))
    except RecursionError:
        raise UserError(f"{where}: tables and lists are nested too deeply") from None
    except ValidationError as e:
        key, message = _describe_error(e)
        raise UserError(f"{_source(key, where, overrides)}: {message}") from None
    check(config, lambda key: _source(key, where, overrides))
    return config


def suggestion(path: str, value: object = None) -> str:
    """Return a hint for an unknown key, such as "did you mean rollout.n?"; "" if no key is similar.

    path: section.key, with tables in lists as data.tasks[].name. value: the value of the key. If it is a table, it may
    contain keys of another trainer.
    """
    for name in _names_in(path, value):
        if hint := foreign_key_hint(name, keys()):
            return hint if name == path else f"{name}: {hint}"

    # The name may be a misspelt section, a misspelt key of this section, or a key of another section.
    section, _, last = path.rpartition(".")
    if path in json_schema()["properties"]:
        return ""
    if not section:
        close = difflib.get_close_matches(last, json_schema()["properties"])
    else:
        keys_by_name = {key.rpartition(".")[2]: key for key in keys() if key.rpartition(".")[0] == section}
        close = [keys_by_name[name] for name in difflib.get_close_matches(last, keys_by_name)]
    close = close or [key for key in keys() if key.rpartition(".")[2] == last]
    return f"did you mean {' or '.join(close[:3])}?" if close else ""


def _names_in(path: str, value: object) -> list[str]:
    """Return a key and all keys below it."""
    inside = value.items() if isinstance(value, Mapping) else ()
    return [path, *(name for key, inner in inside for name in _names_in(f"{path}.{key}", inner))]


def _override(table: dict[str, Any], item: str) -> None:
    """Apply one `section.key=value`. The value is TOML, or a plain string if it is not valid TOML."""
    key, equals, text = item.partition("=")
    *tables, last = key.strip().split(".")
    if not equals or not tables or not all((*tables, last)):
        hint = suggestion(key.strip()) if equals else ""
        raise UserError(f"override {shown(item)}: {hint or 'expected section.key=value, for example rollout.n=64'}")
    try:
        value: Any = tomllib.loads(f"v = {text}")["v"]
    except (ValueError, RecursionError):
        value = text
    for name in tables:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise UserError(f"override {shown(item)}: {name} is not a table")
    table[last] = value


def _source(key: str, where: str, overrides: Sequence[str]) -> str:
    """Return the override that sets a key, or a key below it, or `where` if none does."""
    for item in overrides:
        name = item.partition("=")[0].strip()
        if key == name or key.startswith((f"{name}.", f"{name}[")) or name.startswith(f"{key}."):
            return f"override {shown(item)}"
    return where


def _describe_error(error: ValidationError) -> tuple[str, str]:
    """Return the first unknown key, or else the first key with a wrong value, and a message about it."""
    first = sorted(error.errors(), key=lambda e: e["type"] != "unexpected_keyword_argument")[0]
    path = "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in first["loc"]).lstrip(".")
    if first["type"] == "unexpected_keyword_argument":
        schema_path = re.sub(r"\[\d+\]", "[]", path)
        section = schema_path.rpartition(".")[0]
        known = ", ".join(key.rpartition(".")[2] for key in keys() if key.rpartition(".")[0] == section)
        hint = suggestion(schema_path, first["input"]) or f"known here: {known or ', '.join(Config.__annotations__)}"
        return path, f"unknown key {path}; {hint}"
    if first["type"] == "missing":
        return path, f"{path} is missing"
    if first["type"] == "too_long":
        return path, f"{path} = {shown(first['input'])}: must have {first['ctx']['max_length']} values"
    if first["type"] == "too_short":
        return path, f"{path} = {shown(first['input'])}: must not be empty"
    message = first["msg"].replace("Input should be", "must be")
    message = message.replace("an object", "a table").replace("array", "list")
    return path, f"{path} = {shown(first['input'])}: {message}"


@functools.cache
def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a configuration file."""
    return TypeAdapter(Config).json_schema() | {"title": "brorl"}


@functools.cache
def keys() -> dict[str, dict[str, Any]]:
    """Return the JSON Schema of every key by its path: "rollout.n", and "data.tasks[].name" in a list of tables."""
    return {path: schema for path, schema in _walk(json_schema(), prefix="") if "." in path}


def table_of(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the schema of the table that a key holds, directly or as items of a list; None if it holds a value."""
    reference = schema.get("items", schema).get("$ref", "")
    table: dict[str, Any] | None = json_schema()["$defs"].get(reference.rpartition("/")[2])
    return table


def _walk(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, schema in table["properties"].items():
        yield prefix + name, schema
        inner = table_of(schema)
        if inner:
            yield from _walk(inner, f"{prefix}{name}{'[]' if 'items' in schema else ''}.")
