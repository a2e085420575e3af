"""Intervals against tables and by hand."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_brorl.theory.unsampled_mass import unseen_mass, weighted_counts


def test_equal_weights_give_garwood_s_interval():
    """Of 0, 1, 5 and 20 counts, as tables of the Poisson distribution have it (Garwood 1936)."""
    counts = np.array([0.0, 1.0, 5.0, 20.0])
    table = [(0, 3.688879), (0.025318, 5.571643), (1.623486, 11.668332), (12.216527, 30.888381)]
    for weight in (1.0, 0.01):
        low, high = weighted_counts(weight * counts, weight**2 * counts, np.full(4, weight))
        assert low == pytest.approx([weight * a for a, _ in table], rel=1e-5, abs=1e-12)
        assert high == pytest.approx([weight * b for _, b in table], rel=1e-5)


def test_unequal_weights_hold_their_mean():
    """Sums of three Poisson counts of very unequal weights: at least 95%, as Fay and Feuer found."""
    rng = np.random.default_rng(0)
    weights, means = np.array([1.0, 0.1, 0.01]), np.array([0.5, 4.0, 60.0])
    counts = rng.poisson(means, size=(4000, 3))
    low, high = weighted_counts(counts @ weights, counts @ weights**2, np.ones(4000))
    assert np.mean((low < weights @ means) & (weights @ means < high)) > 0.945


def test_unseen_mass_by_hand():
    """Either end is where the count's distance is 1.96 of its standard deviations there."""
    for n, once, twice in ((100, 30, 10), (16, 7, 2), (512, 40, 3)):
        for end in unseen_mass(n, once, twice):
            assert 0 < end < 1
            assert abs(once - n * end) == pytest.approx(1.959964 * (n * end * (1 - end) + 2 * twice + 2) ** 0.5)
    # Nothing came once: eight draws cannot exclude a mass of 1 - 0.025^(1/8). Nothing came twice: it may be all.
    none, every = unseen_mass(8, 0, 0), unseen_mass(64, 64, 0)
    assert none[0] == 0
    assert none[1] >= 1 - 0.025 ** (1 / 8)
    assert unseen_mass(8, 8, 0)[1] == every[1] == 1
    assert 0.88 < every[0] < 0.95
