"""Metrics of the ranks of a step: waiting times, throughput and utilisation; and traces of single steps.

The seconds of a phase are those in which a rank does its own work. They do not include the reduction of gradients, in
which it waits for others. Exchange and weight sync are collectives, so their seconds include waiting.

Traces are in Google's Trace Event Format for chrome://tracing and Perfetto: complete events ("ph": "X") with times in
microseconds. Times count from a barrier at the start of the step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_brorl.config.schema import RunConfig
from megatron_brorl.errors import warn
from megatron_brorl.parallel import collectives
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.tracking.timeline import Timeline, record

PHASES = ("generate", "score", "exchange", "train", "weight_sync")
_TRAINING = ("forward", "optimizer step")  # spans of passes; the second includes the reduction of gradients

Columns = Mapping[str, npt.NDArray[np.float64]]  # one value per rank, [ranks]


def cluster_metrics(
    timeline: Timeline, seconds: Mapping[str, float], trained_tokens: float, peak: float | None
) -> dict[str, float]:
    """Return the metrics of a step over all ranks, the same on every rank. Collective.

    seconds: this rank's phases. trained_tokens: of all ranks. peak: FLOP/s of a device; None if unknown, and then there
    are no utilisation metrics.
    """
    values = {**rank_values(timeline), **{f"wall_{name}": seconds[name] for name in ("train", "step")}}
    table = np.array(collectives.all_gather(list(values.values())))
    ranks = dict(zip(values, table.T, strict=True))
    return {**waiting(ranks), **throughput(ranks, trained_tokens, peak), **kv_cache(ranks)}


def rank_values(timeline: Timeline) -> dict[str, float]:
    """Return this rank's seconds, tokens and operations of a step."""
    usage = [s.values for s in timeline.spans if s.name == "generate" and "kv_turns" in s.values]
    return {
        "generate": timeline.seconds("generate") - timeline.total("generate", "idle"),
        "score": timeline.seconds("score"),
        "exchange": timeline.seconds("exchange"),
        "train": sum(map(timeline.seconds, _TRAINING)) - timeline.seconds("reduce gradients"),
        "weight_sync": timeline.seconds("weight_sync"),
        "sampled_tokens": timeline.total("generate", "tokens"),
        "forward_s": timeline.seconds("forward"),
        "forward_flops": timeline.total("forward", "flops"),
        "update_s": timeline.seconds("optimizer step"),
        "update_flops": timeline.total("optimizer step", "flops"),
        "kv_peak": max((u["kv_peak"] for u in usage), default=0.0),
        "kv_sum": sum(u["kv_mean"] * u["kv_turns"] for u in usage),
        "kv_turns": sum(u["kv_turns"] for u in usage),
        "prompt_tokens": sum(u["prompt_tokens"] for u in usage),
        "prompt_found": sum(u["prompt_found"] for u in usage),
    }


def waiting(ranks: Columns) -> dict[str, float]:
    """Return the slowest, mean and fastest rank of each phase in seconds, and the mean share of a phase spent idle.

    ranks/idle is the time that ranks wait for the slowest one, summed over phases, as a share of the step.
    """
    metrics: dict[str, float] = {}
    waited = 0.0
    for phase in PHASES:
        column = ranks[phase]
        slowest = float(column.max())
        mean = float(column.mean())
        if slowest <= 0:
            continue  # The step had no such phase.
        metrics |= {
            f"ranks/{phase}_slowest": slowest,
            f"ranks/{phase}_mean": mean,
            f"ranks/{phase}_fastest": float(column.min()),
        }
        metrics[f"ranks/{phase}_idle"] = 1 - mean / slowest
        waited += slowest - mean

    step = float(ranks["wall_step"].max())
    return {**metrics, "ranks/step_slowest": step, "ranks/idle": waited / step if step > 0 else 0.0}


def throughput(ranks: Columns, trained_tokens: float, peak: float | None) -> dict[str, float]:
    """Return response tokens per second and device, TFLOP/s per device, and its share of the peak (MFU).

    Seconds are those of the slowest rank. throughput/mfu counts only the operations of forward and backward passes, not
    those of generation, but the seconds of the whole step.
    """
    devices = len(ranks["wall_step"])
    sampled = ranks["sampled_tokens"].sum()
    step = ranks["wall_step"].max()
    forward_flops = ranks["forward_flops"].sum()
    update_flops = ranks["update_flops"].sum()
    rates = {  # amount and seconds
        "tokens_per_s": (sampled, step),
        "generate_tokens_per_s": (sampled, ranks["generate"].max()),
        "train_tokens_per_s": (trained_tokens, ranks["wall_train"].max()),
        "forward_tflops": (forward_flops / 1e12, ranks["forward_s"].max()),
        "update_tflops": (update_flops / 1e12, ranks["update_s"].max()),
    }
    metrics = {f"throughput/{name}": float(n / s) / devices for name, (n, s) in rates.items() if n and s > 0}

    if peak:
        for name in ("forward", "update"):
            if f"throughput/{name}_tflops" in metrics:
                metrics[f"throughput/{name}_mfu"] = 1e12 * metrics[f"throughput/{name}_tflops"] / peak
        if forward_flops + update_flops and step > 0:
            metrics["throughput/mfu"] = float((forward_flops + update_flops) / step) / devices / peak
    return metrics


def kv_cache(ranks: Columns) -> dict[str, float]:
    """Return the use of the engine's KV cache, if the engine reports it.

    peak and mean: share of pages in use, the mean over decoding steps of all ranks. rows: rollouts decoded together.
    prompt_hits: share of prompt tokens that were in the cache.
    """
    decoding_steps = float(ranks["kv_turns"].sum())
    if not decoding_steps:
        return {}
    sampled = float(ranks["sampled_tokens"][ranks["kv_turns"] > 0].sum())
    return {
        "kv_cache/peak": float(ranks["kv_peak"].max()),
        "kv_cache/mean": float(ranks["kv_sum"].sum()) / decoding_steps,
        "kv_cache/rows": sampled / decoding_steps,
        "kv_cache/prompt_hits": float(ranks["prompt_found"].sum() / ranks["prompt_tokens"].sum()),
    }


class StepTrace:
    """Records the spans of a step on this rank, and writes them as a trace every run.trace_every steps."""

    def __init__(self, config: RunConfig, step: int, grid: Grid) -> None:
        """Start recording. step: its number in metrics.jsonl. Collective if a trace is due."""
        self.timeline = Timeline()
        record(self.timeline)
        is_written = bool(config.trace_every) and step % config.trace_every == 0
        self._path = Path(config.dir) / "traces" / f"step_{step:06d}.json" if is_written else None
        if is_written:
            grid.barrier()
        self._rank = grid.rank
        self._origin = self.timeline.clock()

    def write_if_due(self) -> None:
        """Write the trace of this step if one is due. Collective in that case."""
        if self._path:
            write_trace(self._path, self.timeline, self._rank, self._origin)


def events(timeline: Timeline, rank: int, origin: float) -> list[dict[str, Any]]:
    """Return a rank's spans as trace events, outer spans first. origin: the clock at the barrier."""
    spans = sorted(timeline.spans, key=lambda s: (s.begin, -s.end))
    metadata = {"ph": "M", "pid": rank, "tid": 0}
    return [
        {**metadata, "name": "process_name", "args": {"name": f"rank {rank}"}},
        {**metadata, "name": "process_sort_index", "args": {"sort_index": rank}},
        *(
            {
                "ph": "X",
                "name": s.name,
                "pid": rank,
                "tid": 0,
                "ts": 1e6 * (s.begin - origin),
                "dur": 1e6 * s.seconds,
                "args": s.values,
            }
            for s in spans
        ),
    ]


def write_trace(path: Path, timeline: Timeline, rank: int, origin: float) -> None:
    """Write the spans of all ranks to `path`, on rank 0. Collective. Prints a warning if the disk refuses it."""
    parts = collectives.all_gather(json.dumps(events(timeline, rank, origin)))
    if rank:
        return
    trace = {"traceEvents": [event for part in parts for event in json.loads(part)], "displayTimeUnit": "ms"}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(trace), encoding="utf-8")
    except OSError as e:
        warn(f"{path}: {e.strerror or e}; this trace is missing")
