"""Which words and letters occur, and how often. Small and capital letters are alike; words are text, not patterns."""

from __future__ import annotations

import re
from collections.abc import Sequence

AT_LEAST, LESS_THAN = "at least", "less than"


def compares(count: int, relation: str, threshold: int) -> bool:
    """Whether the count is "at least" or "less than" the threshold."""
    return count < threshold if relation == LESS_THAN else count >= threshold


def existence(response: str, keywords: Sequence[str]) -> bool:
    """Every keyword occurs, be it within a word."""
    return all(_pattern(keyword).search(response) for keyword in keywords)


def frequency(response: str, keyword: str, frequency: int, relation: str) -> bool:
    """The keyword occurs so often, within words too."""
    return compares(sum(1 for _ in _pattern(keyword.strip()).finditer(response)), relation, frequency)


def forbidden_words(response: str, forbidden_words: Sequence[str]) -> bool:
    """None of the words occurs as a word of its own."""
    return not any(re.search(rf"\b{re.escape(word)}\b", response, re.IGNORECASE) for word in forbidden_words)


def letter_frequency(response: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    """The letter occurs so often."""
    return compares(response.lower().count(letter.lower()), let_relation, let_frequency)


def _pattern(keyword: str) -> re.Pattern[str]:
    return re.compile(re.escape(keyword), re.IGNORECASE)
