"""What a figure of a run is: its name in metrics.jsonl or summary.json, its unit, its range, and what it says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

# What stands for a {name} in the name of a figure.
PLACES = {
    "k": r"\d+",
    "h": r"\d+",
    "phase": "generate|score|exchange|train|refit",
    "when": "before|after",
    "end": "mean|low|high",
    "side": "low|high",
    "name": ".+",
}

SHARE, NUMBER = "[0, 1]", "at least 0"  # the ranges of most


@dataclass(frozen=True)
class Figure:
    """One figure, or those whose names differ in a place: "pass_at_{k}"."""

    name: str
    unit: str
    range: str
    meaning: str
    bad: str = ""  # what a bad value means, and what to do; "": there is none

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Of all names that it has."""
        parts = re.split(r"\{(\w+)\}", self.name)
        return re.compile("".join(f"(?:{PLACES[p]})" if i % 2 else re.escape(p) for i, p in enumerate(parts)))


@dataclass(frozen=True)
class Section:
    """Figures that belong together."""

    title: str
    about: str
    figures: tuple[Figure, ...]
    group: str = ""  # on boards such as TensorBoard; "": they are not shown there
    timed: bool = False  # under "time" in metrics.jsonl: what differs from run to run
