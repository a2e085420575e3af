"""How far an evaluation has come is told now and then, and at its end."""

from __future__ import annotations

import pytest

from megatron_brorl.cli.evaluate import _Ended


@pytest.mark.parametrize("total", [1, 7, 20, 1000])
def test_at_most_twenty_times_and_last_with_all(total):
    told = []

    class Shown:
        def update(self, step_done, metrics):
            told.append(step_done)

    ended = _Ended(Shown(), total)
    for _ in range(total):
        ended()
    assert len(told) == min(total, 20)
    assert told == sorted(set(told))
    assert told[-1] == total
