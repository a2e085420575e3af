"""Metrics and traces of two ranks with made-up timelines."""

from __future__ import annotations

import json
from pathlib import Path

from dist.jobs import grid_of

from megatron_brorl.parallel import collectives
from megatron_brorl.tracking.timeline import Span, Timeline
from megatron_brorl.train.throughput import cluster_metrics, write_trace


def metrics_and_texts(rank: int, path: str) -> tuple[dict[str, float], list[str]]:
    """Return metrics and gathered texts; the second rank takes three times as long and has a longer text."""
    grid_of()
    spans = [Span("generate", begin=0.0, end=1.0 + 2 * rank, values={"tokens": 100.0})]
    spans += [Span("round", begin=0.0, end=5.0, values={})] * (1 + rank)
    timeline = Timeline(spans=spans)
    write_trace(Path(path), timeline, rank, origin=-float(rank))
    metrics = cluster_metrics(timeline, {"train": 2.0, "step": 10.0}, trained_tokens=0.0, peak=None)
    return metrics, collectives.all_gather(f"rank {rank}" * (1 + 3 * rank))


def test_two_ranks(worlds, tmp_path):
    path = tmp_path / "traces" / "step_000001.json"
    (metrics, lines), other = worlds(2).run("test_metrics_of_ranks:metrics_and_texts", str(path))
    assert other == (metrics, lines)
    assert lines == ["rank 0", "rank 1" * 4]
    assert metrics["ranks/generate_slowest"] == 3.0
    assert metrics["ranks/generate_fastest"] == 1.0
    assert metrics["ranks/idle"] == (3.0 - 2.0) / 10.0  # slowest - mean, per step time
    assert metrics["throughput/tokens_per_s"] == 200 / 10 / 2  # per rank
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert [(e["pid"], e["name"], e["ts"], e["dur"]) for e in events] == [  # in us; origin of rank 1: -1 s
        (0, "round", 0.0, 5e6),
        (0, "generate", 0.0, 1e6),
        (1, "round", 1e6, 5e6),
        (1, "round", 1e6, 5e6),
        (1, "generate", 1e6, 3e6),
    ]
