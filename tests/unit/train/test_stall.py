"""What counts as a new best."""

from __future__ import annotations

from megatron_brorl.train.stall import Stall


def test_only_what_is_above_the_best_by_more_than_the_margin_is_new():
    stall = Stall(margin=0.25)
    found = []
    for score in (0.5, 0.625, 0.75, 0.875, 0.125, 1.25, 1.5):
        stall.record(score)
        found.append((stall.best, stall.count))
    assert found == [(0.5, 0), (0.5, 1), (0.5, 2), (0.875, 0), (0.875, 1), (1.25, 0), (1.25, 1)]
