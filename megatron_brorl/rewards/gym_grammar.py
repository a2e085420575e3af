"""What an answer may look like where reasoning-gym's scorer executes it, so that nothing in it can do anything.

The scorers call eval or sympy.parse_expr. Of what these forms let through nothing can be called, no name means
anything, and no number grows: brackets hold literals, expressions have no powers but of one letter to two digits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

_NUMBER = r"-?\d{1,9}(?!\d)"
_LISTED = rf"(?:{_NUMBER}|[\s,\[\]])*"
_TERM = r"[a-z](?:\s*\*\*\s*\d{1,2}(?!\d|\s*\*\*))?(?![a-z(])"

# Of the answer; a text without a match scores 0 unseen. Longer than any right one by far.
_ANSWERS: Mapping[str, tuple[int, re.Pattern[str]]] = {
    "binary_matrix": (4096, re.compile(_LISTED)),
    "spiral_matrix": (4096, re.compile(_LISTED)),
    "n_queens": (4096, re.compile(r"[_Q\s,\[\]\"']*")),
    "string_insertion": (1024, re.compile(r"[A-E\s,\[\]\"']*")),
    "countdown": (200, re.compile(r"(?:\d{1,6}(?!\d)|\*(?!\s*\*)|[\s+\-/()])*")),
    "polynomial_multiplication": (2048, re.compile(rf"(?:{_TERM}|\d{{1,18}}(?!\d|\s*\*\*)|\*(?!\s*\*)|[\s+\-])*")),
    "bitwise_arithmetic": (64, re.compile(r"\s*-?0x[0-9a-f]{1,32}\s*", re.IGNORECASE)),
}
TASKS = frozenset(_ANSWERS)

_BITS = re.compile(r"(?:0x[0-9a-f]{1,16}|<<|>>|\*(?!\s*\*)|[\s+\-()&|^~])*")

# Of what the scorer executes of the row's item: where it stands.
_ROWS: Mapping[str, tuple[Callable[[Mapping[str, Any]], object], re.Pattern[str]]] = {
    "polynomial_multiplication": (lambda item: item["answer"], _ANSWERS["polynomial_multiplication"][1]),
    "bitwise_arithmetic": (
        lambda item: item["metadata"].get("problem"),
        re.compile(r"(?:0x[0-9a-f]{1,16}|<<|>>|\*(?!\s*\*)|[\s+\-()&|^~])*"),
    ),
}


def harmless(task: str, answer: str) -> bool:
    """Whether the scorer of this task may see this answer."""
    if task not in _ANSWERS:
        return True
    longest, form = _ANSWERS[task]
    return len(answer) <= longest and form.fullmatch(answer) is not None


def row_problem(task: str, entry: Mapping[str, Any]) -> str | None:
    """What is wrong with the part of an item that the scorer of this task executes; None if nothing."""
    if task not in _ROWS:
        return None
    part, form = _ROWS[task]
    text = part(entry)
    if isinstance(text, str) and form.fullmatch(text):
        return None
    return f"metadata.entry has {str(text)[:60]!r} where task {task!r} makes an expression"
