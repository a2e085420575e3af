"""The 25 kinds of instructions of IFEval (Zhou et al. 2023, arXiv 2311.07911), by their published ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_brorl.rewards.ifeval import case, form, keywords, language, length, whole


@dataclass(frozen=True)
class Argument:
    """What an argument of an instruction may be."""

    accepts: Callable[[Any], bool]
    meaning: str


@dataclass(frozen=True)
class Kind:
    """A kind of instruction: whether a response follows it, given its arguments by name."""

    follows: Callable[..., bool]
    arguments: Mapping[str, Argument] = field(default_factory=dict)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


_COUNT = Argument(_is_count, "a whole number of at least 0")
_ORDINAL = Argument(lambda v: _is_count(v) and v > 0, "a whole number of at least 1")
_RELATION = Argument(
    lambda v: v in (keywords.AT_LEAST, keywords.LESS_THAN), f'"{keywords.AT_LEAST}" or "{keywords.LESS_THAN}"'
)
_TEXT = Argument(_is_text, "a string that is not empty")
_TEXTS = Argument(
    lambda v: isinstance(v, list | tuple) and bool(v) and all(map(_is_text, v)), "a list of strings, none of them empty"
)
_LETTER = Argument(lambda v: _is_text(v) and len(v) == 1, "one character")
_LANGUAGE = Argument(
    lambda v: isinstance(v, str) and v in language.LANGUAGES, f"one of {' '.join(sorted(language.LANGUAGES))}"
)

KINDS: Mapping[str, Kind] = {
    "keywords:existence": Kind(keywords.existence, {"keywords": _TEXTS}),
    "keywords:frequency": Kind(keywords.frequency, {"keyword": _TEXT, "frequency": _COUNT, "relation": _RELATION}),
    "keywords:forbidden_words": Kind(keywords.forbidden_words, {"forbidden_words": _TEXTS}),
    "keywords:letter_frequency": Kind(
        keywords.letter_frequency, {"letter": _LETTER, "let_frequency": _COUNT, "let_relation": _RELATION}
    ),
    "language:response_language": Kind(language.response_language, {"language": _LANGUAGE}),
    "length_constraints:number_words": Kind(length.number_words, {"num_words": _COUNT, "relation": _RELATION}),
    "length_constraints:number_sentences": Kind(
        length.number_sentences, {"num_sentences": _COUNT, "relation": _RELATION}
    ),
    "length_constraints:number_paragraphs": Kind(length.number_paragraphs, {"num_paragraphs": _ORDINAL}),
    "length_constraints:nth_paragraph_first_word": Kind(
        length.nth_paragraph_first_word,
        {"num_paragraphs": _ORDINAL, "nth_paragraph": _ORDINAL, "first_word": _TEXT},
    ),
    "detectable_content:number_placeholders": Kind(form.number_placeholders, {"num_placeholders": _COUNT}),
    "detectable_content:postscript": Kind(form.postscript, {"postscript_marker": _TEXT}),
    "detectable_format:number_bullet_lists": Kind(form.number_bullet_lists, {"num_bullets": _COUNT}),
    "detectable_format:constrained_response": Kind(form.constrained_response),
    "detectable_format:number_highlighted_sections": Kind(form.number_highlighted_sections, {"num_highlights": _COUNT}),
    "detectable_format:multiple_sections": Kind(
        form.multiple_sections, {"section_spliter": _TEXT, "num_sections": _COUNT}
    ),
    "detectable_format:json_format": Kind(form.json_format),
    "detectable_format:title": Kind(form.title),
    "combination:two_responses": Kind(whole.two_responses),
    "combination:repeat_prompt": Kind(whole.repeat_prompt, {"prompt_to_repeat": _TEXT}),
    "startend:end_checker": Kind(whole.end_checker, {"end_phrase": _TEXT}),
    "startend:quotation": Kind(whole.quotation),
    "change_case:capital_word_frequency": Kind(
        case.capital_word_frequency, {"capital_frequency": _COUNT, "capital_relation": _RELATION}
    ),
    "change_case:english_capital": Kind(case.english_capital),
    "change_case:english_lowercase": Kind(case.english_lowercase),
    "punctuation:no_comma": Kind(whole.no_comma),
}
