"""Estimates of the unsampled mass against enumeration and against known policies."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from megatron_brorl.theory.unsampled_mass import good_turing, hold_out, unseen_mass, weighted_counts


def _policy(seed: int, outcomes: int = 300):
    """Return a Zipf-like distribution over outcomes, a third of which is right."""
    rng = np.random.default_rng(seed)
    p = 1 / np.arange(1, outcomes + 1) ** rng.uniform(0.8, 1.6)
    return rng.permutation(p / p.sum()), rng.random(outcomes) < 0.35


POLICIES = [_policy(seed) for seed in range(8)]
N = 64  # siblings of a group
REPETITIONS = 200
HELD = [2, 4, 8, 16, 32]  # numbers of held-out siblings


@pytest.fixture(scope="module")
def policy_groups():
    """Draw REPETITIONS lists with a group of each policy: N outcomes, and whether they are right."""
    rng = np.random.default_rng(100)
    return [[(x := rng.choice(len(p), size=N, p=p), right[x]) for p, right in POLICIES] for _ in range(REPETITIONS)]


def expected(p: np.ndarray, chosen: np.ndarray, draws: int, power: int) -> float:
    """Return the expected sum of p^power over the chosen outcomes (a mask) that no draw has."""
    return float((p[chosen] ** power * (1 - p[chosen]) ** draws).sum())


def test_hold_out_on_a_known_policy(policy_groups):
    """Estimates are unbiased within 3 standard errors of 200 repetitions; 95% intervals cover at least 93%."""
    curves = [hold_out(groups, HELD) for groups in policy_groups]
    for i, held in enumerate(HELD):
        rest = N - held
        truths = [
            (expected(p, p > 0, rest, power=1), expected(p, right, rest, power=2), expected(p, ~right, rest, power=2))
            for p, right in POLICIES
        ]
        for field, truth in zip(("unsampled_mass", "u_pos2", "u_neg2"), np.mean(truths, axis=0), strict=True):
            estimates, low, high = np.array([c[field][:, i] for c in curves]).T
            assert abs(estimates.mean() - truth) < 3 * estimates.std() / np.sqrt(REPETITIONS), (field, held)
            assert np.mean((low < truth) & (truth < high)) > 0.93, (field, held)
            assert np.mean(high - low) < 2 * (2 * 1.96 * estimates.std()), (field, held)  # twice the exact width


def test_good_turing_by_hand():
    outcomes = np.array([7, 7, 7, 1, 2, 2, 9, 5])
    right = np.array([True, True, True, False, True, True, True, False])
    g = good_turing(outcomes, right)
    assert (g.distinct, g.singletons, g.doubletons) == (5, 3, 1)
    assert (g.unseen_mass, g.unseen_right, g.unseen_wrong) == (3 / 8, 1 / 8, 2 / 8)
    assert (g.low, g.high) == unseen_mass(8, 3, 1)


def test_intervals_without_repetitions():
    """64 draws from 4,096 equally likely outcomes often all differ. The unseen mass is then 1 - 64 / 4,096, not 1."""
    right = np.arange(64) % 2 == 0
    g = good_turing(np.arange(64), right)
    assert (g.unseen_mass, g.unseen_right, g.singletons, g.high) == (1, 0.5, 64, 1)
    assert 0.85 < g.low < 1 - 64 / 4096
    # Without repetitions the second moments are 0. Their upper ends are -log(0.025) = 3.688879 x the largest weight.
    curve = hold_out([(np.arange(64), right)], [2, 32])
    assert not np.any([curve[name][:2] for name in ("u_pos2", "u_neg2")])
    for m, high in zip((62, 32), curve["u_pos2"][2], strict=True):
        largest = max(c * (c - 1) / 64 / 63 * math.comb(64 - c, m) / math.comb(62, m) for c in range(2, 65))
        assert high == pytest.approx(3.688879 * largest)
    # If all outcomes are equal, no held-out sibling is new.
    same = hold_out([(np.zeros(64, dtype=np.int64), right)], [2])
    assert (same["unsampled_mass"][0][0], same["unsampled_mass"][1][0]) == (0, 0)
    assert same["unsampled_mass"][2][0] == pytest.approx(3.688879 / 64)
    # If all outcomes differ, the estimate is 1, and rounding does not put it above the interval's end.
    for n in range(4, 65):
        mean, _, high = hold_out([(np.arange(n), np.arange(n) % 2 == 0)] * 3, [2, n // 2])["unsampled_mass"]
        assert mean == pytest.approx(1)
        assert (mean <= high).all()
        assert (high == 1).all()


def test_hold_out_is_the_average_over_all_splits():
    outcomes = np.array([0, 0, 1, 2, 2, 2, 3])
    right = np.isin(outcomes, [0, 3])
    curve = hold_out([(outcomes, right)], [2, 3, 5])
    for i, h in enumerate((2, 3, 5)):
        mass, pos, neg = [], [], []
        for held in itertools.combinations(range(7), h):
            rest = set(outcomes[[j for j in range(7) if j not in held]])
            new = [outcomes[j] not in rest for j in held]
            mass.append(np.mean(new))
            pairs = list(itertools.combinations(range(h), 2))
            new_pair = [new[a] and outcomes[held[a]] == outcomes[held[b]] for a, b in pairs]
            right_pair = [right[held[a]] for a, _ in pairs]
            pos.append(np.mean([x and y for x, y in zip(new_pair, right_pair, strict=True)]))
            neg.append(np.mean([x and not y for x, y in zip(new_pair, right_pair, strict=True)]))
        assert curve["unsampled_mass"][0][i] == pytest.approx(np.mean(mass), rel=1e-12)
        assert curve["u_pos2"][0][i] == pytest.approx(np.mean(pos), rel=1e-12, abs=1e-15)
        assert curve["u_neg2"][0][i] == pytest.approx(np.mean(neg), rel=1e-12, abs=1e-15)


def test_hold_out_refuses_impossible_numbers(policy_groups):
    for held in ([1], [N], []):
        with pytest.raises(ValueError, match="hold_out"):
            hold_out(policy_groups[0], held)


def test_equal_weights_give_the_interval_of_garwood():
    """For 0, 1, 5 and 20 counts, compare with tables of the Poisson distribution (Garwood 1936)."""
    counts = np.array([0.0, 1.0, 5.0, 20.0])
    table = [(0, 3.688879), (0.025318, 5.571643), (1.623486, 11.668332), (12.216527, 30.888381)]
    for weight in (1.0, 0.01):
        low, high = weighted_counts(weight * counts, weight**2 * counts, np.full(4, weight))
        assert low == pytest.approx([weight * a for a, _ in table], rel=1e-5, abs=1e-12)
        assert high == pytest.approx([weight * b for _, b in table], rel=1e-5)


def test_unseen_mass_by_hand():
    """At either end m, the singletons are 1.96 standard deviations from their expected number n m."""
    for n, once, twice in ((100, 30, 10), (16, 7, 2), (512, 40, 3)):
        for end in unseen_mass(n, once, twice):
            assert 0 < end < 1
            assert abs(once - n * end) == pytest.approx(1.959964 * (n * end * (1 - end) + 2 * twice + 2) ** 0.5)
    # Without singletons, eight draws cannot exclude a mass of 1 - 0.025^(1/8). Without pairs, the mass may be 1.
    low, high = unseen_mass(8, 0, 0)
    assert low == 0
    assert high >= 1 - 0.025 ** (1 / 8)
    low, high = unseen_mass(64, 64, 0)
    assert 0.88 < low < 0.95
    assert high == unseen_mass(8, 8, 0)[1] == 1
