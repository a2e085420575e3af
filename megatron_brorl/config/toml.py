"""From a TOML table to frozen dataclasses: strict, with messages that name the file and the key."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import types
import typing
from typing import Any, Literal

from megatron_brorl.config.renamed import RENAMED
from megatron_brorl.config.suggest import suggestion
from megatron_brorl.errors import UserError, shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_INDEX = re.compile(r"\[\d+\]")  # of a table in a list of them
MOST = 1e30  # of a float; float32, in which most of them are used, ends at 3.4e38


def override(table: dict[str, Any], item: str) -> None:
    """Apply one `a.b=c`; the value is TOML, or a plain string where it is not."""
    key, eq, text = item.partition("=")
    parts = key.strip().split(".")
    if not eq or len(parts) != 2 or not all(parts):
        hint = suggestion(key.strip()) if eq else ""
        raise UserError(f"override {shown(item)}: {hint or 'expected section.key=value, for example rollout.n=64'}")
    try:
        value: Any = tomllib.loads(f"v = {text}")["v"]
    except (ValueError, RecursionError):  # no TOML; too many digits, or too deep
        value = text
    section = table.setdefault(parts[0], {})
    if not isinstance(section, dict):
        raise UserError(f"override {shown(item)}: {parts[0]} is not a section")
    section[parts[1]] = value


def build(cls: type, table: Any, where: str, prefix: str) -> Any:
    """A cls from a table of its fields. Raises UserError naming a key of it that is unknown, mistyped or missing."""
    if not isinstance(table, dict):
        raise UserError(f"{where}: {prefix.rstrip('.')} must be a table, not {shown(table)}")
    hints = typing.get_type_hints(cls)
    known = [f.name for f in dataclasses.fields(cls)]

    # Every key is known, by the name that it has now.
    for key in table:
        renamed = RENAMED.get(_INDEX.sub("", f"{prefix}{key}"))
        if renamed:
            raise UserError(f"{where}: {prefix}{key} is now called {prefix}{renamed}; rename it")
        if key not in known:
            hint = suggestion(_INDEX.sub("[]", f"{prefix}{key}"), table[key]) or f"known here: {', '.join(known)}"
            raise UserError(f"{where}: unknown key {prefix}{key}; {hint}")

    # What is not given takes its default, where it has one.
    try:
        return cls(**{k: _convert(hints[k], v, where, f"{prefix}{k}") for k, v in table.items()})
    except TypeError:
        missing = [f.name for f in dataclasses.fields(cls) if f.name not in table and _required(f)]
        raise UserError(f"{where}: {prefix}{missing[0]} is missing") from None


def _required(f: dataclasses.Field[Any]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _convert(hint: Any, value: Any, where: str, key: str) -> Any:
    """The value as its field's type hint has it: a table as its dataclass, a list as a tuple, an int as a float."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)

    # Values of several parts.
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, where, f"{key}.")
    if origin is tuple:
        return _tuple(args, value, where, key)
    # A table that another program reads, such as a task's settings.
    if origin is dict or isinstance(origin, types.GenericAlias):
        if not isinstance(value, dict):
            raise UserError(f"{where}: {key} = {shown(value)}: must be a table")
        # Checkpoints keep the configuration as JSON, which has no dates, and no NaN that equals itself when it is read.
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            raise UserError(
                f"{where}: {key} = {shown(value)}: must hold text, finite numbers, booleans, lists and tables"
            ) from None
        return value

    # Single values. A bool is no int here, though Python's isinstance says so.
    if origin is Literal:
        if value not in args:
            raise UserError(f"{where}: {key} = {shown(value)}: must be one of {', '.join(map(repr, args))}")
        return value
    if hint is float and type(value) in (int, float):  # TOML tells 1 from 1.0; a float key takes both
        return _finite(value, where, key)

    # The rest, bool, int and str, is taken as it is: a number in quotes is no number, nor one that no TOML writes.
    if type(value) is int and abs(value) >= 2**63:
        raise UserError(f"{where}: {key} = {shown(value)}: must be within 64 bits")
    if type(value) is not hint:
        raise UserError(f"{where}: {key} = {shown(value)}: must be of type {hint.__name__}")
    return value


def _tuple(args: tuple[Any, ...], value: Any, where: str, key: str) -> tuple[Any, ...]:
    """A list as tuple[T, ...], or as a tuple of a type for each of its places."""
    if not isinstance(value, list):
        raise UserError(f"{where}: {key} = {shown(value)}: must be a list")
    hints = [args[0]] * len(value) if args[-1] is Ellipsis else args
    if len(value) != len(hints):
        raise UserError(f"{where}: {key} = {shown(value)}: must have {len(hints)} values")
    return tuple(_convert(h, v, where, f"{key}[{i}]") for i, (h, v) in enumerate(zip(hints, value, strict=True)))


def _finite(value: float, where: str, key: str) -> float:
    """TOML has inf, nan and numbers that float32 does not hold; no key has a use for them."""
    if not -MOST <= value <= MOST:
        raise UserError(f"{where}: {key} = {shown(value)}: must be finite, and within +-{MOST:g}")
    return float(value)
