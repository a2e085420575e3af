"""Every key of the configuration in words: type, default, bound and meaning, read from the schema's own source.

A key's meaning is the comment above its field and the one beside it; nothing is written down twice.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import io
import tokenize
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from megatron_brorl.config.bounds import Bound
from megatron_brorl.config.resume_keys import fixed_keys
from megatron_brorl.config.schema import Config

_NAMES = {int: "integer", float: "number", bool: "boolean", str: "string"}  # as JSON Schema calls them


@dataclass(frozen=True)
class Key:
    """A key of a section; of a table in a list, its path has [] behind the list: data.tasks[].name."""

    path: str
    hint: Any  # the type of the field
    default: Any  # as a frozen value of that type; dataclasses.MISSING where it must be given
    meaning: str  # with its unit
    bound: Bound | None
    fixed: bool = False  # a resumed run must keep it

    @property
    def required(self) -> bool:
        """Whether a table must have it."""
        return self.default is dataclasses.MISSING

    @property
    def type(self) -> str:
        """The type in words."""
        return type_text(self.hint)


@functools.cache
def keys() -> tuple[Key, ...]:
    """Every key, section by section; a table's own keys follow the key that holds it."""
    return tuple(
        key for section in dataclasses.fields(Config) for key in _keys_of(_hints(Config)[section.name], section.name)
    )


def sections() -> dict[str, str]:
    """What is said of each section as a whole; "" where nothing is."""
    return {name: _doc(kind) for name, kind in _hints(Config).items()}


def written(value: Any) -> str:
    """A value as TOML has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(written, value))}]"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return written({name: x for name, x in given.items() if x != getattr(type(value)(), name)})
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {written(v)}" for k, v in value.items()) + "}"
    return repr(value)


def type_text(hint: Any) -> str:
    """A type in words: "list of string"."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " | ".join(map(written, args))
    if origin is tuple:
        of = type_text(args[0])
        return f"list of {of}" if args[-1] is Ellipsis else f"list of {len(args)} {of}s"
    return _NAMES.get(hint, "table")


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 7, which TOML editors read) of a configuration file."""
    table = _table_schema(Config)
    for name, schema in table["properties"].items():
        schema["description"] = sections()[name] or f"[{name}]"
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "brorl", **table}


def _table_schema(kind: type) -> dict[str, Any]:
    """A dataclass as a table that has no other keys."""
    fields = {f.name: f for f in dataclasses.fields(kind)}
    meanings = _meanings(kind)
    schema: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": {}}
    for name, hint in _hints(kind).items():
        bound, default = fields[name].metadata.get("bound"), _default(fields[name])
        found = _value_schema(hint, bound)
        if meanings.get(name):
            found["description"] = meanings[name]
        if default is not dataclasses.MISSING and not dataclasses.is_dataclass(default):
            found["default"] = list(default) if isinstance(default, tuple) else default
        schema["properties"][name] = found

    required = [name for name, f in fields.items() if _default(f) is dataclasses.MISSING]
    return schema | ({"required": required} if required else {})


def _value_schema(hint: Any, bound: Bound | None) -> dict[str, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _table_schema(typing.cast(type, hint))
    if origin is Literal:
        return {"enum": list(args)}
    if origin is tuple:
        length = {} if args[-1] is Ellipsis else {"minItems": len(args), "maxItems": len(args)}
        return {"type": "array", "items": _value_schema(args[0], bound), **length}
    return {"type": _NAMES.get(hint, "object"), **(bound.schema if bound else {})}


def _keys_of(kind: type, prefix: str) -> Iterator[Key]:
    hints, meanings = _hints(kind), _meanings(kind)
    for f in dataclasses.fields(kind):
        path, hint = f"{prefix}.{f.name}", hints[f.name]
        listed = typing.get_origin(hint) is tuple
        inner: Any = typing.get_args(hint)[0] if listed else hint
        table = dataclasses.is_dataclass(inner)
        said = (meanings.get(f.name), _doc(inner) if table and not listed else "")
        yield Key(
            path, hint, _default(f), " ".join(filter(None, said)), f.metadata.get("bound"), _top(path) in fixed_keys()
        )

        # What a table, or each of a list of them, is made of.
        if table:
            yield from _keys_of(inner, path + ("[]" if listed else ""))


def _top(path: str) -> str:
    """Return section.key of a key, also of one in a table in it: data.columns of data.columns.prompt."""
    return ".".join(path.replace("[]", "").split(".")[:2])


def _default(f: dataclasses.Field[Any]) -> Any:
    return f.default if f.default_factory is dataclasses.MISSING else f.default_factory()


def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _doc(kind: type) -> str:
    """The docstring as one text; "" for the one that dataclasses make."""
    doc = inspect.getdoc(kind) or ""
    return "" if doc.startswith(f"{kind.__name__}(") else " ".join(doc.split())


@functools.cache
def _meanings(kind: type) -> dict[str, str]:
    """The comments of each field of a dataclass: those right above it, then the one beside it."""
    source = inspect.getsource(kind)
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT]
    comments = {t.start[0]: t.string.removeprefix("#").strip() for t in tokens}
    alone = {t.start[0] for t in tokens if t.line.lstrip().startswith("#")}

    found = {}
    body = typing.cast(ast.ClassDef, ast.parse(source).body[0]).body
    for node in body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        # Upward to the line that is no comment of its own.
        first = node.lineno
        while first - 1 in alone:
            first -= 1
        lines = range(first, (node.end_lineno or node.lineno) + 1)
        found[node.target.id] = " ".join(comments[line] for line in lines if line in comments)
    return found
