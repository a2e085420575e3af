"""Slopes by hand, and a step of the share that does what a step does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import bench_growth as growth


def test_exponents_by_hand():
    assert growth.exponent([2, 4, 8, 16], [3.0 * n**1.5 for n in (2, 4, 8, 16)]) == pytest.approx(1.5)
    assert growth.exponent([64, 128], [0.5, 0.5]) == pytest.approx(0.0)


def test_the_share_of_one_rank(processes):
    """A quarter of 4 x 32 rollouts, whose tokens are those drawn for the slots that it was dealt."""
    share = growth.Share(prompts=4, n=32, ranks=4)
    share.step()
    assert list(share.seconds) == list(growth.PHASES)
    assert share.rows == 32
    assert share.tokens == int(share.lengths[:, :8].sum())
    assert all(seconds >= 0 for seconds in share.seconds.values())


def test_lengths():
    lengths = growth.drawn(128, 512, seed=1).double()
    assert 0.9 * growth.MEAN < float(lengths.mean()) < growth.MEAN  # but for what is cut off
    assert lengths.max() == growth.LONGEST
