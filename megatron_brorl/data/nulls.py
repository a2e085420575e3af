"""A key with null counts as a missing key, in JSONL and Parquet alike.

Arrow gives every object of a column the keys of all the others, as null, so that a reader cannot tell one that was
written from one that was filled in. Some nulls are values all the same: `expected` of a function's test, for a function
that returns None; `answer` of a reasoning-gym item, for tasks with many right answers; and, where JSON says it, any
null inside of the arguments and results of a test or of such an item.
"""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Collection
from typing import Any


def without_nulls(value: Any) -> Any:
    """Return a copy of a JSON value in which no object has a null key, at any depth. Null elements of lists stay."""
    return _copied(value, arrow=False)


def from_arrow(value: Any) -> Any:
    """Return a value of an Arrow column as JSON would hold it: without nulls, with dates as text and plain numbers."""
    return _copied(value, arrow=True)


def _copied(value: Any, arrow: bool) -> Any:
    # A loop and no recursion, because rows nest as deep as they like.
    top = [value]
    left: list[Any] = [top]
    while left:
        parent = left.pop()
        data = () if arrow else _data_keys(parent)

        # Children are replaced by copies, which are looked into in turn.
        for key, child in parent.items() if isinstance(parent, dict) else enumerate(parent):
            if key in data:
                continue
            if isinstance(child, (dict, list)):
                parent[key] = _without_own_nulls(key, child) if isinstance(child, dict) else list(child)
                left.append(parent[key])
            elif arrow:
                parent[key] = _json_value(child)
    return top[0]


def _without_own_nulls(name: str | int, found: dict[str, Any]) -> dict[str, Any]:
    """Return a copy without null keys, but for the one whose null is a value. name: the key of the object itself."""
    value = "expected" if _is_call(found) else "answer" if name == "entry" else None
    return {key: child for key, child in found.items() if child is not None or key == value}


def _is_call(found: dict[str, Any]) -> bool:
    """Whether an object is the test of a function (rewards/code.py)."""
    return isinstance(found.get("args"), list)


def _data_keys(found: Any) -> Collection[str]:
    """The keys of an object whose values go to a program, or to a scorer, as they were written."""
    if not isinstance(found, dict):
        return ()
    return ("args", "kwargs", "expected") if _is_call(found) else ("entry",) if "source_dataset" in found else ()


def _json_value(value: Any) -> Any:
    if isinstance(value, (datetime.date, datetime.time)):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value
