from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest

from megatron_brorl.data.mixture import Place, places, whole_weights
from megatron_brorl.data.source import FileSource, MixtureSource
from megatron_brorl.types import Prompt

CASES = [[1], [1, 1], [2, 3, 5], [1, 1, 1, 7], [1, 100], [4, 4, 2], [333, 333, 334], [1, 2, 3, 4, 5, 6, 7]]


def by_votes(weights: list[int], count: int) -> list[Place]:
    """Sainte-Lague by its definition: seat by seat to the party with the largest votes / (2 seats + 1)."""
    seats = [0] * len(weights)
    order = []
    for _ in range(count):
        best = max(range(len(weights)), key=lambda i: (Fraction(weights[i], 2 * seats[i] + 1), -i))
        order.append(Place(best, seats[best]))
        seats[best] += 1
    return order


def test_whole_weights() -> None:
    assert whole_weights([0.4, 0.35, 0.25]) == [8, 7, 5]  # 0.1 + 0.2 is 0.3, whatever floats say
    assert whole_weights([0.1, 0.2, 0.3]) == [1, 2, 3]
    assert whole_weights([3.0, 1.5]) == [2, 1]
    assert whole_weights([1e-7, 1.0]) == [1, 10**7]


@pytest.mark.parametrize("weights", CASES)
def test_places_are_those_of_the_definition(weights: list[int]) -> None:
    whole = by_votes(weights, 400)
    assert places(weights, 0, 400) == whole
    for start in (1, 7, 50, 123, 399):  # from anywhere, as if nothing had been computed before
        assert places(weights, start, 1) == whole[start : start + 1]
        assert places(weights, start, 30)[: 400 - start] == whole[start : start + 30]


@pytest.mark.parametrize("weights", CASES)
def test_shares_are_exact_at_every_multiple_and_near_in_between(weights: list[int]) -> None:
    total, k = sum(weights), len(weights)
    had: Counter[int] = Counter()
    for p, (source, position) in enumerate(places(weights, 0, 3 * total + 11), start=1):
        assert position == had[source]  # no row of a source is left out or comes twice
        had[source] += 1
        for i, w in enumerate(weights):
            assert abs(had[i] - Fraction(p * w, total)) <= Fraction(1, 2) + Fraction(k * w, 2 * total)
            if p % total == 0:
                assert had[i] == p * w // total


def test_far_places_cost_no_more_than_near_ones() -> None:
    """At a whole number of periods the order begins anew, at any distance."""
    weights = whole_weights([0.4, 0.123456789, 0.2])
    far = 10**12 * sum(weights)
    expected = [Place(s, position + 10**12 * weights[s]) for s, position in places(weights, 0, 50)]
    assert places(weights, far, 50) == expected


def prompts(name: str, count: int) -> list[Prompt]:
    return [Prompt(f"{name}{i}", name, (1,), "1", "exact") for i in range(count)]


SOURCES = {"a": prompts("a", 5), "b": prompts("b", 3), "c": prompts("c", 40)}


def test_a_mixture_takes_every_source_by_its_own_epochs() -> None:
    taken = [p for step in range(25) for p in MixtureSource(SOURCES, [0.5, 0.3, 0.2], seed=1).take(8 * step, 8)]
    assert Counter(p.text for p in taken) == {"a": 100, "b": 60, "c": 40}
    for name, rows in SOURCES.items():
        mine = [p.id for p in taken if p.text == name]
        epochs = [mine[i : i + len(rows)] for i in range(0, len(mine), len(rows))]
        assert all(sorted(epoch) == sorted(p.id for p in rows) for epoch in epochs)
        assert mine == [p.id for p in FileSource(rows, f"1:{name}").take(0, len(mine))]


def test_a_mixture_is_resumed_and_cut_anywhere() -> None:
    """The prompt at a place depends on seed and place alone: not on earlier steps, and not on how a step is cut."""
    whole = MixtureSource(SOURCES, [5, 3, 2], seed=1).take(0, 240)
    for size in (1, 8, 24, 60):
        for start in (0, 1, size, 3 * size):
            assert MixtureSource(SOURCES, [5, 3, 2], seed=1).take(start, size) == whole[start : start + size]
    other = MixtureSource(SOURCES, [5, 3, 2], seed=2).take(0, 240)
    assert [p.text for p in other] == [p.text for p in whole]
    assert [p.id for p in other] != [p.id for p in whole]
