"""Test spans with a scripted clock."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_brorl.tracking import timeline as module
from megatron_brorl.tracking.timeline import Place, Span, Timeline, count, phase, place, record, span


def test_spans_nest_and_add_up():
    ticks = iter([1.0, 2.0, 5.0, 6.0, 6.5, 10.0])
    timeline = Timeline(lambda: next(ticks))
    record(timeline)
    with span("outer") as outer:
        with span("inner") as values:
            values["tokens"] = 3.0
        values["late"] = 1.0  # values may be added after the end
        with pytest.raises(KeyError), span("inner") as failed:
            failed["tokens"] = {}["missing"]
    record(None)
    with span("not recorded") as unrecorded:
        unrecorded["tokens"] = 5.0
    assert not outer
    assert timeline.spans == [
        Span("inner", 2.0, 5.0, {"tokens": 3.0, "late": 1.0}),
        Span("inner", 6.0, 6.5, {}),  # a span that raises is recorded too
        Span("outer", 1.0, 10.0, {}),
    ]
    assert (timeline.seconds("inner"), timeline.seconds("outer"), timeline.seconds("other")) == (3.5, 9.0, 0.0)
    assert (timeline.total("inner", "tokens"), timeline.total("inner", "late")) == (3.0, 1.0)


def test_the_place_is_the_innermost_span_and_the_longest_allowance(monkeypatch):
    clock = iter((100.0, 101.0, 102.0, 103.0))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    before = place().changes
    places = []
    with span("round", allowance_s=30.0):
        places.append(place())
        with span("score", allowance_s=5.0):
            places.append(place())
        places.append(place())
    places.append(place())
    expected = [("round", 130.0), ("score", 131.0), ("round", 132.0), ("no phase", 103.0)]  # clock + 30 s within round
    assert places == [Place(before + i, *name_and_due) for i, name_and_due in enumerate(expected, 1)]


def test_a_count_belongs_to_its_span():
    with span("evaluate"), span("generate"):
        count(15, 40)
        assert phase()[:3] == (["evaluate", "generate"], 15, 40)
