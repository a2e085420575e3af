"""Who is behind, and when: places made by hand; how a whole job ends is in e2e/test_hanging_ranks.py."""

from __future__ import annotations

import errno
import json
import threading
import time

import pytest

from megatron_brorl import hang
from megatron_brorl.hang import Observer, Place, Watch, behind
from megatron_brorl.timeline import each_beats, position, span


def place(turns=1, finished=1, passed=0, limit_s=0.0, waits=False):
    return Place(turns, finished, passed, "collect", limit_s, waits)


@pytest.mark.parametrize(
    ("places", "silent", "expected"),
    [
        ([place(passed=7, waits=True), place(passed=7)], [], [1]),  # the one that no collective holds
        (
            [place(passed=9), place(passed=7), place(passed=7, waits=True)],
            [],
            [1],
        ),  # of those the one with fewest spans
        ([place(passed=8, waits=True), place(passed=7, waits=True)], [], [1]),  # each in a collective, but not the same
        ([place(passed=7), place(passed=7), place(passed=8)], [], [0, 1]),
        ([place(passed=3), place(passed=8, waits=True)], [1], [1]),  # who does not run is behind wherever it stands
    ],
)
def test_who_is_behind(places, silent, expected):
    assert behind(dict(enumerate(places)), frozenset(silent)) == expected


def looks(observer, frames):
    """The first answer, with its number; a frame is (seconds since the one before, places)."""
    for i, (seconds, places) in enumerate(frames):
        if found := observer.look(dict(enumerate(places)), seconds):
            return i, *found
    return None


def test_progress_of_any_rank_counts_for_all():
    """Rank 0 finishes something at 3 s and nothing after it; rank 1 waits from the start."""
    frames = [(1.0, [place(t, finished=min(t, 3)), place(t, waits=True)]) for t in range(20)]
    assert looks(Observer(5.0), frames) == (9, [0], "has come no further", 6.0)


def test_a_phase_s_own_limit_is_granted_but_not_to_a_process_that_does_not_run():
    frames = [(1.0, [place(t, limit_s=4.0), place(t, waits=True)]) for t in range(20)]
    assert looks(Observer(5.0), frames) == (10, [0], "has come no further", 10.0)
    stopped = [(1.0, [place(t), place(min(t, 2), limit_s=40.0)]) for t in range(20)]
    # Rank 0 goes on finishing things: that one does not turn is enough.
    stopped = [(s, [place(t, finished=t + 1), b]) for t, (s, (_, b)) in enumerate(stopped)]
    assert looks(Observer(5.0), stopped) == (8, [1], "has not run", 6.0)


def test_ranks_that_load_and_ranks_that_are_done_are_not_judged():
    loading = [(1.0, [place(t), place(t, finished=0)]) for t in range(20)]
    assert looks(Observer(5.0), loading) is None
    done = [(1.0, [place(t)] if t > 2 else [place(t), place(0)]) for t in range(8)]
    assert looks(Observer(5.0), done) == (6, [0], "has come no further", 6.0)  # of the one that is left
    assert looks(Observer(5.0), [(1.0, [])] * 20) is None


def test_position_has_the_spans_of_all_ranks_and_the_longest_limit():
    passed, finished = position.passed, position.finished
    with span("collect"), span("generate", 30.0), span("forward"):
        assert position.where().endswith("collect > generate > forward")
        assert position.limit_s() == 30.0
        assert list(each_beats("abc")) == ["a", "b", "c"]
    assert position.where().endswith("between phases")
    assert position.limit_s() == 0.0
    assert position.passed - passed == 4  # how many forwards there are depends on a rank's rows
    assert position.finished - finished == 9


def test_a_watch_tells_its_place_and_leaves_nothing(tmp_path):
    Watch.clear(tmp_path)
    watch = Watch(tmp_path, rank=9, world=10, timeout_s=0.8, late_s=1.0)
    watch.start()
    deadline = time.monotonic() + 30
    with span("update"):
        while not (text := (tmp_path / ".progress" / "9").read_text()) or json.loads(text)["finished"] == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        found, finished = Place(**json.loads(text)), position.finished
    assert (found.where, found.waits, found.finished) == ("update", False, finished)
    hang.wait_failed(late=False)  # nobody has been told to end
    watch.stop()
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_is_done_sees_the_main_rank_through(tmp_path):
    Watch.clear(tmp_path)
    watch = Watch(tmp_path, rank=1, world=2, timeout_s=8.0, late_s=1.0)
    watch.start()
    told = threading.Event()
    waits = threading.Thread(target=watch.see_through, args=(told.is_set,))
    waits.start()
    waits.join(0.5)
    assert waits.is_alive()
    told.set()
    waits.join(30)
    assert not waits.is_alive()
    watch.stop()


def test_what_an_earlier_job_left_and_cannot_be_removed_is_an_error(tmp_path, monkeypatch):
    def refuse(path):
        raise OSError(errno.EIO, "Input/output error", str(path))

    (tmp_path / ".progress").mkdir()
    monkeypatch.setattr(hang.shutil, "rmtree", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        Watch.clear(tmp_path)
