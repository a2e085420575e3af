"""Structures that refuse what msgspec's refuse: unknown and positional fields, and values of another type."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args, get_origin, get_type_hints


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a type: a class, a union, a list or set of one type, or any."""
    if kind is Any:
        return True
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (list, set):
        return isinstance(value, (list, set, tuple)) and all(fits(x, inner[0]) for x in value)
    if origin is not None:  # a union
        return any(fits(value, k) for k in inner)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


class Strict:
    """Of a dataclass with keyword-only fields."""

    def check(self) -> None:
        """Raises TypeError where a field's value is not of its type."""
        kinds = get_type_hints(type(self))
        for f in fields(self):  # type: ignore[arg-type]
            if not fits(getattr(self, f.name), kinds[f.name]):
                raise TypeError(f"Expected `{kinds[f.name]}`, got {getattr(self, f.name)!r} - at `$.{f.name}`")
