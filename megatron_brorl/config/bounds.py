"""Bounds of single values, which stand with their fields in the schema: `n: int = at_least(1, default=512)`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

_INTERVAL = re.compile(r"([\[(])(\S+), (\S+)([\])])")


@dataclass(frozen=True)
class Bound:
    """What a value must fulfil, and how a message says it."""

    holds: Callable[[float], bool]
    message: str
    schema: Mapping[str, float]  # the same in the words of JSON Schema


def at_least(least: float, default: T, why: str = "") -> T:
    """A field that is `least` or more."""
    message = f"must be at least {least}" if least else "must not be negative"
    return _bounded(default, Bound(lambda value: value >= least, message + why, {"minimum": least}))


def above(limit: float, default: T, why: str = "") -> T:
    """A field that is more than `limit`."""
    return _bounded(
        default, Bound(lambda value: value > limit, f"must be above {limit}{why}", {"exclusiveMinimum": limit})
    )


def within(interval: str, default: T) -> T:
    """A field in an interval such as "(0, 1]"; of a tuple, every value."""
    found = _INTERVAL.fullmatch(interval)
    if found is None:
        raise ValueError(f"{interval!r}: must be an interval like (0, 1]")
    opening, low, high, closing = found[1], float(found[2]), float(found[3]), found[4]

    def holds(value: float) -> bool:
        after_low = value > low if opening == "(" else value >= low
        return after_low and (value < high if closing == ")" else value <= high)

    schema = {
        "exclusiveMinimum" if opening == "(" else "minimum": low,
        "exclusiveMaximum" if closing == ")" else "maximum": high,
    }
    return _bounded(default, Bound(holds, f"must be in {interval}", schema))


def broken(section: Any) -> Iterator[tuple[str, str]]:
    """(field, message) of every value of a section that is out of its bound."""
    for f in dataclasses.fields(section):
        bound, value = f.metadata.get("bound"), getattr(section, f.name)
        values = value if isinstance(value, tuple) else (value,)
        if bound is not None and not all(map(bound.holds, values)):
            yield f.name, bound.message


def _bounded(default: T, bound: Bound) -> T:
    return field(default=default, metadata={"bound": bound})
