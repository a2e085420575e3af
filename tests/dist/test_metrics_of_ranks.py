"""Metrics and traces of two ranks."""

from __future__ import annotations

import json


def test_two_ranks(worlds, tmp_path):
    path = tmp_path / "traces" / "step_000001.json"
    (metrics, lines), other = worlds(2).run("metrics_jobs:metrics_and_texts", str(path))
    assert other == (metrics, lines)
    assert lines == ["rank 0", "rank 1" * 4]
    assert metrics["ranks/generate_slowest"] == 3.0
    assert metrics["ranks/generate_fastest"] == 1.0
    assert metrics["ranks/idle"] == (3.0 - 2.0) / 10.0
    assert metrics["throughput/tokens_per_s"] == 200 / 10 / 2
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert [(e["pid"], e["name"], e["ts"], e["dur"]) for e in events] == [
        (0, "round", 0.0, 5e6),
        (0, "generate", 0.0, 1e6),
        (1, "round", 1e6, 5e6),
        (1, "round", 1e6, 5e6),
        (1, "generate", 1e6, 3e6),
    ]
