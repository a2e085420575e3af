"""Pairs of layouts and cases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def pairs(layouts: Sequence[tuple[Any, ...]], cases: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return (*layout, case) for every layout and case."""
    return [(*layout, case) for layout in layouts for case in cases]
