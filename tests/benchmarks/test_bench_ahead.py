"""Generation in the simulation of bench_ahead.py, by hand."""

from __future__ import annotations

import bench_ahead as simulation
import numpy as np
import pytest


def test_generation():
    def step(rows: int) -> float:
        return simulation.STEP_S + rows * simulation.ROW_S

    # One engine with two rows: 4 and 1 tokens begin, 2 tokens follow after step 1, and 3 tokens after step 3.
    seconds, last_start = simulation.generation(np.array([4, 1, 2, 3]), engines=1, rows=2)
    assert last_start == pytest.approx(3 * step(2))
    assert seconds == pytest.approx(4 * step(2) + 2 * step(1))
    # Two engines: the second one takes 1, 2 and 3 tokens in turn, with one row at a time.
    seconds, last_start = simulation.generation(np.array([4, 1, 2, 3]), engines=2, rows=1)
    assert (seconds, last_start) == (pytest.approx(6 * step(1)), pytest.approx(3 * step(1)))


def test_lengths_have_the_mean_after_the_cut():
    tokens = simulation.lengths(200_000, mean=9000, longest=15360, rng=np.random.default_rng(1))
    assert tokens.mean() == pytest.approx(9000, rel=0.01)
    assert tokens.max() == 15360
