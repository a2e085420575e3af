"""Metrics of a run that are not documented, and shares outside [0, 1]."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_brorl.tracking.metric_docs import find


def of_row(row: Mapping[str, Any]) -> list[str]:
    """Return the faults of a line of metrics.jsonl."""
    metrics = {k: v for k, v in row.items() if k not in ("step", "nonfinite", "time")}
    return [*_faults(metrics, "step"), *_faults(row.get("time", {}), "time")]


def of_summary(summary: Mapping[str, Any]) -> list[str]:
    """Return the faults of a summary.json."""
    return _faults(dict(_flat(summary, "")), "summary")


def _faults(metrics: Mapping[str, Any], file: str) -> list[str]:
    faults = []
    for name, value in metrics.items():
        entry = find(name, file)  # a section and the documentation
        unit = entry[1].unit if entry else ""
        if not entry:
            faults.append(f"{name}: not in metric_docs.json")
        elif value is not None and (unit.startswith("share") or unit == "probability") and not 0 <= value <= 1 + 1e-12:
            faults.append(f"{name} = {value}: not in [0, 1]")
    return faults


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else key)
    else:
        yield name, value
