"""How many words, sentences and paragraphs."""

from __future__ import annotations

import re

from megatron_brorl.rewards.ifeval.keywords import compares
from megatron_brorl.rewards.ifeval.text import count_sentences, count_words

_DIVIDER = re.compile(r"\s?\*\*\*\s?")
_ENDS_FIRST_WORD = re.compile(r"[.,?!'\"]")


def number_words(response: str, num_words: int, relation: str) -> bool:
    """So many words."""
    return compares(count_words(response), relation, num_words)


def number_sentences(response: str, num_sentences: int, relation: str) -> bool:
    """So many sentences."""
    return compares(count_sentences(response), relation, num_sentences)


def number_paragraphs(response: str, num_paragraphs: int) -> bool:
    """Exactly so many paragraphs, with the divider *** between them; only before the first and after the last is
    nothing allowed."""
    first, *others = _DIVIDER.split(response)
    inner, last = others[:-1], others[-1:]
    if not all(paragraph.strip() for paragraph in inner):
        return False
    return len(inner) + sum(bool(paragraph.strip()) for paragraph in (first, *last)) == num_paragraphs


def nth_paragraph_first_word(response: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Exactly so many paragraphs with an empty line between them, and the n-th begins with the word.

    n counts what stands between the empty lines, be it empty.
    """
    # Empty ones are no paragraphs, but they take a place.
    paragraphs = [paragraph.strip() for paragraph in response.split("\n\n")]
    if sum(map(bool, paragraphs)) != num_paragraphs or nth_paragraph > num_paragraphs:
        return False
    paragraph = paragraphs[nth_paragraph - 1]
    if not paragraph:
        return False

    # The word without quotes before it, up to a mark behind it.
    word = paragraph.split()[0].lstrip("'").lstrip('"')
    return _ENDS_FIRST_WORD.split(word)[0].lower() == first_word.lower()
