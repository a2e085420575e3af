"""Metrics and traces of ranks with made-up timelines."""

from __future__ import annotations

from pathlib import Path

from dist.jobs import grid_of

from megatron_brorl.parallel import collectives
from megatron_brorl.tracking.timeline import Span, Timeline
from megatron_brorl.train.throughput import cluster_metrics, write_trace


def metrics_and_texts(rank: int, path: str) -> tuple[dict[str, float], list[str]]:
    """Return metrics and gathered texts; the second rank takes three times as long and has a longer text."""
    grid_of()
    spans = [Span("generate", 0.0, 1.0 + 2 * rank, {"tokens": 100.0}), *[Span("round", 0.0, 5.0, {})] * (1 + rank)]
    timeline = Timeline(spans=spans)
    write_trace(Path(path), timeline, rank, -float(rank))
    metrics = cluster_metrics(timeline, {"train": 2.0, "step": 10.0}, 0.0, None)
    return metrics, collectives.all_gather(f"rank {rank}" * (1 + 3 * rank))
