"""Documentation of every metric of metrics.jsonl and summary.json, read from metric_docs.json.

`brorl metrics`, the documentation page, the report and the groups in TensorBoard and other trackers use it. A metric's
unit says its range where that matters: shares and probabilities are in [0, 1].
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path

# Placeholders of metric names that stand for something else than a word.
_PLACEHOLDERS = {"k": r"\d+", "h": r"\d+", "when": "(?:before|after)", "name": ".+"}


@dataclass(frozen=True)
class Metric:
    """A metric, or several whose names differ in a placeholder, such as "pass_at_{k}"."""

    name: str
    unit: str
    meaning: str
    bad: str  # meaning of a bad value and its remedy, or ""

    def matches(self, name: str) -> bool:
        """Return whether `name` is a name of this metric."""
        parts = re.split(r"\{(\w+)\}", self.name)  # placeholders are at odd indices
        pattern = (_PLACEHOLDERS.get(p, "[a-z_]+") if i % 2 else re.escape(p) for i, p in enumerate(parts))
        return re.fullmatch("".join(pattern), name) is not None


@dataclass(frozen=True)
class Section:
    """Metrics that belong together."""

    title: str
    about: str
    group: str  # in trackers such as TensorBoard, or ""
    file: str  # "step": top level of metrics.jsonl, "time": under its "time" key, "summary": summary.json
    metrics: tuple[Metric, ...]


@functools.cache
def sections() -> tuple[Section, ...]:
    """Return all sections, in the order of the documentation page."""
    data = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return tuple(Section(**{**entry, "metrics": tuple(Metric(*row) for row in entry["metrics"])}) for entry in data)


@functools.cache
def find(name: str, file: str = "step") -> tuple[Section, Metric] | None:
    """Return the documentation of a metric of a file with its section, or None."""
    known = [(section, metric) for section in sections() if section.file == file for metric in section.metrics]
    # The exact name comes first, since a placeholder may match it too.
    known.sort(key=lambda pair: pair[1].name != name)
    return next((pair for pair in known if pair[1].matches(name)), None)
