"""Whether what a program gave is what its test expects. Both are of builtin types here."""

from __future__ import annotations

import math
from typing import Any


def same_text(got: str, expected: str, tolerance: float = 0.0) -> bool:
    """Line by line and word by word: the amount of white space says nothing, nor do empty lines at the end.

    With a tolerance, words that are numbers may differ by so much, in absolute value or relative to what is expected.
    """
    return same_value(_words(got), _words(expected), tolerance, words=True)


def same_value(got: Any, expected: Any, tolerance: float = 0.0, words: bool = False) -> bool:
    """Equality that neither takes True for 1 nor lists for sets; a list expected may come as a tuple.

    words: texts are compared as numbers too, where there is a tolerance.
    """
    # Containers by their parts.
    if isinstance(expected, (list, tuple)):
        kinds = (list, tuple) if isinstance(expected, list) else (tuple,)
        if not isinstance(got, kinds) or len(got) != len(expected):
            return False
        return all(same_value(g, e, tolerance, words) for g, e in zip(got, expected, strict=True))
    if isinstance(expected, dict):
        if not isinstance(got, dict) or _kinds(got) != _kinds(expected):
            return False
        return all(same_value(got[key], expected[key], tolerance, words) for key in expected)
    if isinstance(expected, (set, frozenset)):
        return isinstance(got, (set, frozenset)) and _kinds(got) == _kinds(expected)

    # Numbers by value, so that 2 is 2.0; all else by type and value.
    if words and tolerance and isinstance(got, str) and got != expected:
        return _near(_number(got), _number(expected), tolerance)
    if _is_number(got) and _is_number(expected):
        return bool(got == expected) or _near(got, expected, tolerance) or (got != got and expected != expected)
    return type(got) is type(expected) and bool(got == expected)


def _words(text: str) -> list[list[str]]:
    lines = [line.split() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _kinds(values: Any) -> set[Any]:
    """Members with what tells True from 1."""
    return {(isinstance(value, bool), value) for value in values}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, complex)) and not isinstance(value, bool)


def _number(word: str) -> float:
    try:
        return float(word) if "_" not in word else math.nan
    except ValueError:
        return math.nan


def _near(got: Any, expected: Any, tolerance: float) -> bool:
    try:
        return bool(tolerance and abs(got - expected) <= tolerance * max(1.0, abs(expected)))
    except OverflowError:
        return False
