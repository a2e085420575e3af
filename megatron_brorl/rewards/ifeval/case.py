"""Capital and small letters."""

from __future__ import annotations

from megatron_brorl.rewards.ifeval.keywords import compares
from megatron_brorl.rewards.ifeval.language import is_language
from megatron_brorl.rewards.ifeval.text import capital_words


def capital_word_frequency(response: str, capital_frequency: int, capital_relation: str) -> bool:
    """So many words in capital letters."""
    return compares(capital_words(response), capital_relation, capital_frequency)


def english_capital(response: str) -> bool:
    """English without a small letter."""
    return response.isupper() and is_language(response, "en")


def english_lowercase(response: str) -> bool:
    """English without a capital letter."""
    return response.islower() and is_language(response, "en")
