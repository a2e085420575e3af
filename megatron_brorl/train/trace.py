"""A trace of one step for chrome://tracing and Perfetto: a process per rank, spans in one another.

The format is Google's "Trace Event Format": complete events ("ph": "X") with times in microseconds. Ranks leave a
barrier at the begin of the step, from which all of them count.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from megatron_brorl.config.schema import RunConfig
from megatron_brorl.parallel import collectives
from megatron_brorl.parallel.grid import Grid
from megatron_brorl.tracking.timeline import Timeline, record


class StepTrace:
    """What every rank does in a step from here on: recorded for figures, and drawn where run.trace_every says so."""

    def __init__(self, config: RunConfig, step: int, grid: Grid) -> None:
        """Start recording a step; step: its number in metrics.jsonl. A collective where the step is drawn."""
        self.timeline = Timeline()
        record(self.timeline)
        drawn = bool(config.trace_every) and step % config.trace_every == 0
        self._path = Path(config.dir) / "traces" / f"step_{step:06d}.json" if drawn else None
        # Where it is drawn all begin at a barrier, from which they count.
        if drawn:
            grid.barrier()
        self._rank, self._origin = grid.rank, self.timeline.clock()

    def write(self) -> None:
        """Draw it, where it is to be drawn; a collective."""
        if self._path:
            write_trace(self._path, self.timeline, self._rank, self._origin)


def events(timeline: Timeline, rank: int, origin: float) -> list[dict[str, Any]]:
    """The spans of a rank as trace events, the outer before the inner. origin: the clock's value at the barrier."""
    spans = sorted(timeline.spans, key=lambda s: (s.begin, -s.end))
    named = {"ph": "M", "pid": rank, "tid": 0}  # metadata, which viewers label and order processes by
    return [
        {**named, "name": "process_name", "args": {"name": f"rank {rank}"}},
        {**named, "name": "process_sort_index", "args": {"sort_index": rank}},
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
    """Write what all ranks did to `path`, on rank 0; a collective. A disk that refuses it is told of, and nothing else
    happens."""
    parts = collectives.all_gather(json.dumps(events(timeline, rank, origin)))
    if rank:
        return
    found = {"traceEvents": [event for part in parts for event in json.loads(part)], "displayTimeUnit": "ms"}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found), encoding="utf-8")
    except OSError as e:
        with contextlib.suppress(OSError):  # stderr may be a file on the same full disk
            print(f"warning: {path}: {e.strerror or e}; this trace is missing", file=sys.stderr, flush=True)
