from __future__ import annotations

import itertools
import random

import pytest

from megatron_brorl.data.prepare.overlap import Contamination, Duplicates, Hit, normalized, words


def test_normalized_texts() -> None:
    assert normalized(" What  is\n2 + 3?") == "what is 2 + 3?"
    assert normalized("\uff12 \u212b STRASSE") == normalized("2 \u00e5 stra\u00dfe")  # full width, Angstrom, sharp s
    assert normalized("2+3") != normalized("2-3")
    assert words("Let $x_1=\\frac{1}{2}$, isn't it?") == ["let", "x_1", "frac", "1", "2", "isn", "t", "it"]


def test_duplicates() -> None:
    seen = Duplicates()
    assert seen.reason("What is 2+3?", "5") == ""
    assert seen.reason("what  IS 2+3?", "5 ") == "duplicate"
    assert seen.reason("What is 2+3?", "6") == "duplicate with another answer"
    assert seen.reason("What is 2+3?", "5") == "duplicate"
    assert seen.reason("What is 2-3?", "5") == ""
    assert seen.reason("Prove it.", None) == ""
    assert seen.reason("Prove it.", "") == "duplicate"


@pytest.mark.parametrize("n", [1, 2, 4])
def test_shared_words_by_brute_force(n: int) -> None:
    """Against a search for every run of n words of one text in the other, over many short texts of few words."""
    draw = random.Random(n)
    texts = [[draw.choice("abcde") for _ in range(draw.randrange(0, 9))] for _ in range(160)]
    evaluation, training = texts[:12], texts[12:]
    found = Contamination(n)
    for i, text in enumerate(evaluation):
        found.add(" ".join(text), f"e:{i}")

    hits = 0
    for text in training:
        shared = [
            (i, j)
            for (i, other), j in itertools.product(enumerate(evaluation), range(len(text) - n + 1))
            if any(other[k : k + n] == text[j : j + n] for k in range(len(other) - n + 1))
        ]
        same = [i for i, other in enumerate(evaluation) if other == text and len(other) < n]
        hit = found.find(" ".join(text))
        hits += hit is not None
        assert (hit is not None) == bool(shared or same)
        if hit and shared:
            first = min(j for _, j in shared)  # the first such run of the training text ...
            assert hit == Hit(f"e:{min(i for i, j in shared if j == first)}", " ".join(text[first : first + n]))
        elif hit:
            assert hit == Hit(f"e:{same[0]}", " ".join(text))
    assert 10 < hits < len(training) or n == 1


def test_a_short_problem_counts_as_a_whole_alone() -> None:
    found = Contamination(13)
    found.add("What is 2+3?", "e:1")
    assert found.find("what is  2+3?") == Hit("e:1", "what is 2+3?")
    assert found.find("What is 2-3?") is None
    assert found.find("Ann asks: What is 2+3?") is None


def test_wording_is_no_disguise() -> None:
    found = Contamination(5)
    found.add("A train leaves at noon; how far is it at 3 p.m.?", "e:1")
    hit = found.find("Bo says: a TRAIN leaves, at noon: how many stops?")
    assert hit == Hit("e:1", "a train leaves at noon")
