"""What of a run's rows the glossary does not know, or knows otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_brorl.glossary.tables import OF_A_RUN, OF_A_STEP, OF_TIME, find

ROUNDING = 1e-12
NUMBER = r"-?\d+(?:\.\d+)?"


def of_row(row: Mapping[str, Any]) -> list[str]:
    """Of a line of metrics.jsonl: figures without an entry, and values out of their range."""
    figures = {k: v for k, v in row.items() if k not in ("step", "nonfinite", "time")}
    return [*_faults(figures, OF_A_STEP), *_faults(row.get("time", {}), OF_TIME)]


def of_summary(summary: Mapping[str, Any]) -> list[str]:
    """The same of a summary.json."""
    return _faults(dict(_flat(summary, "")), OF_A_RUN)


def _faults(figures: Mapping[str, Any], sections: Any) -> list[str]:
    faults = []
    for name, value in figures.items():
        found = find(name, sections)
        if found is None:
            faults.append(f"{name}: not in the glossary (megatron_brorl/glossary)")
        elif isinstance(value, (int, float)) and value == value and not _within(value, found[1].range):
            faults.append(f"{name} = {value}: the glossary says {found[1].range}")
    return faults


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else key)
    else:
        yield name, value


def _within(value: float, text: str) -> bool:
    """Whether a range that is one of numbers holds the value; others hold any."""
    if found := re.fullmatch(rf"([\[(])({NUMBER}), ({NUMBER})([\])])", text):
        low, high = float(found[2]), float(found[3]) + ROUNDING
        above = value >= low if found[1] == "[" else value > low
        return above and (value <= high if found[4] == "]" else value < high)
    if found := re.fullmatch(rf"(at least|at most|above) ({NUMBER})", text):
        bound = float(found[2])
        return {"at least": value >= bound, "at most": value <= bound, "above": value > bound}[found[1]]
    return text not in ("0, 1", "null", "{}") or (text == "0, 1" and value in (0, 1))
