"""Words and sentences, counted by hand."""

from __future__ import annotations

import random

import pytest

from megatron_brorl.rewards.ifeval.text import capital_words, count_sentences, count_words


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("...", 0),
        ("No mark at the end", 1),
        ("One. Two! Three? Four", 4),
        ("What?! No!!! Well...", 3),
        ("Line one\nline two\n\nline three", 1),  # a line is no sentence
        ("Mr. Smith and Dr. J. R. Jones met at 5 p.m. in the U.S. embassy.", 1),
        ("It begins at 5 p.m. The doors open before.", 2),
        ("Apples, pears, etc. are fruit, e.g. sweet ones, i.e. ripe ones (cf. fig. 3).", 1),
        ("Pi is 3.14 and example.com is a site; see v1.2.", 1),
        ('"Stop." "Go!" (He went.) **Then he stopped.**', 4),
        ("He said “no.” She said »yes!« They left.", 3),
        ("Well... maybe. Well... Maybe.", 3),
        ("Wait… what? Wait… What?", 3),
        ("1. Mix.\n2. Bake.", 4),  # as nltk: the number of a list ends a sentence
        ("am 3. tag der reise", 1),
        ("今日は晴れです。明日は雨ですか\uff1fはい\uff01", 3),
        ("यह एक वाक्य है। यह दूसरा है।", 2),
        ("Vitamin C. It helps.", 2),
        ("He said no. Then yes.", 2),
    ],
)
def test_sentences(text: str, count: int) -> None:
    assert count_sentences(text) == count


@pytest.mark.parametrize(
    ("text", "words", "capitals"),
    [
        ("", 0, 0),
        ("One TWO three", 3, 1),
        ("WELL-KNOWN, IT'S", 4, 2),
        ("**BOLD**;NEXT—LAST", 3, 3),
        ("A1 2 _ b2", 4, 1),
        ("I... AM", 2, 2),
        ("ÜBER über", 2, 1),
    ],
)
def test_words(text: str, words: int, capitals: int) -> None:
    assert count_words(text) == words
    assert capital_words(text) == capitals


def test_sentences_put_together_are_counted() -> None:
    """Any mix of sentences with known parts, in any order and with any white space."""
    random.seed(0)
    sentences = [
        ("The box of Mr. Jones weighs 2.5 kg.", 1),
        ("Is it so?", 1),
        ('He cried "No!" and ran away.', 2),
        ("See chap. 3 of vol. 2.", 2),  # an unknown abbreviation ends one
        ("It was over ...", 1),
        ("(Nobody knew.)", 1),
    ]
    for _ in range(50):
        chosen = random.choices(sentences, k=8)
        text = "".join(sentence + random.choice([" ", "\n", "\n\n", "  "]) for sentence, _ in chosen)
        assert count_sentences(text) == sum(count for _, count in chosen), text
