"""Traces against scripted clocks: the format, the order, and two ranks in one file."""

from __future__ import annotations

import json

from megatron_brorl.parallel import collectives
from megatron_brorl.tracking.timeline import Timeline
from megatron_brorl.train.throughput import write_trace


def recorded(*ticks: float) -> Timeline:
    clock = iter(ticks)
    timeline = Timeline(lambda: next(clock))
    with timeline.span("collect"):
        with timeline.span("generate") as came_to:
            came_to["tokens"] = 12.0
        with timeline.span("score"):
            pass
    return timeline


def test_two_ranks_in_one_file(monkeypatch, tmp_path):
    """The second rank's clock has another origin; it left the barrier at 500."""
    ranks = [(recorded(10.5, 11.0, 13.0, 13.0, 13.25, 14.0), 10.0), (recorded(500, 501, 505, 505, 506, 508), 500.0)]
    path, lines = tmp_path / "traces" / "step_000007.json", []
    for rank in (1, 0):
        timeline, origin = ranks[rank]
        monkeypatch.setattr(collectives, "all_gather", lambda line: lines.insert(0, line) or lines)
        write_trace(path, timeline, rank, origin)
        assert path.exists() == (rank == 0)  # only the main rank writes

    # Fields that the format requires of complete events and of metadata.
    events = json.loads(path.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert [(e["pid"], e["name"], e["ts"], e["dur"]) for e in spans] == [
        (0, "collect", 0.5e6, 3.5e6),
        (0, "generate", 1e6, 2e6),
        (0, "score", 3e6, 0.25e6),
        (1, "collect", 0.0, 8e6),
        (1, "generate", 1e6, 4e6),
        (1, "score", 5e6, 1e6),
    ]
    assert [e["args"] for e in spans[:3]] == [{}, {"tokens": 12.0}, {}]
    assert all(e["tid"] == 0 for e in events)
    names = [(e["pid"], e["args"]["name"]) for e in events if e["ph"] == "M" and e["name"] == "process_name"]
    assert names == [(0, "rank 0"), (1, "rank 1")]


def test_full_disk_does_not_end_the_run(processes, tmp_path, capfd):
    (tmp_path / "traces").write_text("a file where the folder should be")
    write_trace(tmp_path / "traces" / "step_000001.json", recorded(*range(6)), 0, 0.0)
    assert "this trace is missing" in capfd.readouterr().err
