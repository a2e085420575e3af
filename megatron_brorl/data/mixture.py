"""Which source of a mixture stands at a place of the stream: a pure function of the weights and the place.

Sources follow one another as seats do in the method of Sainte-Lague (Webster): the next place goes to the source with
the largest weight / (2 places so far + 1), the one that is most behind its share. Among k sources of shares w, which
add up to 1, source i has p w_i of the first p places, give or take (1 + k w_i) / 2; and exactly p w_i wherever p is a
multiple of the whole-number weights' sum. Nothing is drawn, so that no seed can make a step poor in one source.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple


class Place(NamedTuple):
    """What stands at a place of the stream."""

    source: int
    position: int  # in the stream of that source: how often it has come before


def whole_weights(weights: Sequence[float]) -> list[int]:
    """The smallest whole numbers in the proportion of the weights as they are written: 0.4 is two fifths."""
    exact = [Fraction(repr(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    shared = math.gcd(*whole)
    return [weight // shared for weight in whole]


def places(weights: Sequence[int], start: int, count: int) -> list[Place]:
    """Places `start` to `start + count` of the stream, in time that does not grow with `start`."""
    had = _counts(weights, start)
    found = []
    for _ in range(count):
        source = _next(weights, had)
        found.append(Place(source, had[source]))
        had[source] += 1
    return found


def _counts(weights: Sequence[int], places: int) -> list[int]:
    """How many of the first `places` each source has."""
    # By the bound above none has had fewer than this, and the rest is a matter of a few places.
    total, k = sum(weights), len(weights)
    had = [max(0, -(-(2 * places * w - total - k * w) // (2 * total))) for w in weights]
    for _ in range(places - sum(had)):
        had[_next(weights, had)] += 1
    return had


def _next(weights: Sequence[int], had: Sequence[int]) -> int:
    """The source with the largest weight / (2 had + 1), the first of several."""
    return min(range(len(weights)), key=lambda i: Fraction(2 * had[i] + 1, weights[i]))
