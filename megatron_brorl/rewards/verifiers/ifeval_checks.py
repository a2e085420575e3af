"""The 25 instruction checks of IFEval (Zhou et al. 2023, arXiv 2311.07911).

Every check takes the response and the arguments that a data set names. Words and sentences are counted by fixed rules
in linear time; the published program counts them with nltk, whose models change with its version.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


LESS_THAN, AT_LEAST = "less than", "at least"
LANGUAGES = _words(
    "af ar bg bn ca cs cy da de el en es et fa fi fr gu he hi hr hu id it ja kn ko lt lv mk ml mr ne nl no pa pl pt ro "
    "ru sk sl so sq sv sw ta te th tl tr uk ur vi zh-cn zh-tw"  # of langdetect 1.0.9
)

_WORD = re.compile(r"\w+")
_NOT_IN_WORDS = re.compile(r"[\s,:;@#$%&?!*()\[\]{}<>\"`«»“”„\u2012-\u2015]+|--+|\.\.+|…")
_BULLETS = (re.compile(r"^[^\S\n]*\*[^*].*$", re.MULTILINE), re.compile(r"^[^\S\n]*-.*$", re.MULTILINE))
_HIGHLIGHTS = (re.compile(r"\*([^\n*]*)\*"), re.compile(r"\*\*([^\n*]*)\*\*"))
_POSTSCRIPTS = {"P.S.": re.compile(r"p\.\s?s\."), "P.P.S": re.compile(r"p\.\s?p\.\s?s")}
_PARAGRAPH_DIVIDER, _RESPONSE_DIVIDER = re.compile(r"\s?\*\*\*\s?"), re.compile(r"\*{6}")
_FIRST_WORD_END = re.compile(r"[.,?!'\"]")
_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")

# Marks that may end a sentence. The marks of other scripts end one whatever follows.
_OTHER_SCRIPTS = "。\uff01\uff1f।"
_MARKS = re.compile(rf"[.?!…]+|[{_OTHER_SCRIPTS}]+")
_OPENING = "\"'([{*_“\u2018«»"
_CLOSING = re.compile(r"[\"')\]}*_”\u2019»«]*")  # German writes »these« and French «these»
_NEXT_WORD = re.compile(r"[^\w.?!…]{0,24}(\w+)")
_MAX_ABBREVIATION = 24  # characters
_DOTTED = re.compile(r"(?:[^\W\d_]\.)+[^\W\d_]")  # u.s, e.g, p.m without the last dot
_ABBREVIATIONS = _words(
    "mr mrs ms dr prof rev hon gen col capt lt sgt gov sen rep pres st jr sr messrs "
    "jan feb apr jun jul aug sep sept oct nov dec mon tue tues wed thu thur thurs fri "
    "inc ltd co corp bros dept univ assn est ave blvd rd mt ft "
    "vs etc al cf approx ca fig figs vol vols ed eds pp ch sec ph.d"
)
# These words with a capital letter begin a sentence after an abbreviation. A name does not.
_STARTERS = _words(
    "a an the this that these those he she it we they you i his her its our their my your there here if when while "
    "and but or so yet then thus however also in on at for from with after before since as although though because "
    "what who why how where most some many each every both no not please"
)


def _occurs(pattern: str, text: str) -> bool:
    return re.search(pattern, text, re.IGNORECASE) is not None


def _compare(count: int, relation: str, threshold: int) -> bool:
    return count < threshold if relation == LESS_THAN else count >= threshold


def is_in_language(response: str, language: str) -> bool:
    """Return whether the response is in a language. A text without letters is in every language, as published."""
    return detected_language(response) in (None, language)


def _divided(text: str, divider: re.Pattern[str]) -> list[str]:
    """Return the parts between dividers, [] if one between two dividers is empty; the first and last may be empty."""
    first, *others = (part.strip() for part in divider.split(text))
    inner, last = others[:-1], others[-1:]
    return [part for part in (first, *inner, *last) if part] if all(inner) else []


def number_paragraphs(response: str, num_paragraphs: int) -> bool:
    """Return whether the dividers *** separate exactly num_paragraphs paragraphs."""
    return len(_divided(response, _PARAGRAPH_DIVIDER)) == num_paragraphs


def nth_paragraph_first_word(response: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Check the number of paragraphs between empty lines, and the first word of the n-th.

    An empty paragraph is not counted, but it takes a place, as in the published program.
    """
    paragraphs = [paragraph.strip() for paragraph in response.split("\n\n")]
    if sum(map(bool, paragraphs)) != num_paragraphs or nth_paragraph > num_paragraphs:
        return False
    words = paragraphs[nth_paragraph - 1].split()
    return bool(words) and _FIRST_WORD_END.split(words[0].lstrip("'").lstrip('"'))[0].lower() == first_word.lower()


def number_placeholders(response: str, num_placeholders: int) -> bool:
    """Return whether the response has at least num_placeholders [placeholders], each within one line."""
    # Every part before a closing bracket that has an opening one ends a placeholder.
    return sum("[" in part for line in response.split("\n") for part in line.split("]")[:-1]) >= num_placeholders


def postscript(response: str, postscript_marker: str) -> bool:
    """Return whether the marker occurs in either case; P.S. and P.P.S may be spaced."""
    marker, text = postscript_marker.strip(), response.lower()
    pattern = _POSTSCRIPTS.get(marker)
    return pattern.search(text) is not None if pattern else marker.lower() in text


def number_bullet_lists(response: str, num_bullets: int) -> bool:
    """Return whether exactly num_bullets lines begin with * or -. A line that begins with ** does not count."""
    return sum(len(bullet.findall(response)) for bullet in _BULLETS) == num_bullets


def number_highlighted_sections(response: str, num_highlights: int) -> bool:
    """Return whether the response has at least num_highlights nonempty *highlights* and **highlights**."""
    found = [text for pattern in _HIGHLIGHTS for text in pattern.findall(response)]
    return sum(bool(text.strip()) for text in found) >= num_highlights


def multiple_sections(response: str, section_spliter: str, num_sections: int) -> bool:
    """Return whether the response has at least num_sections headings such as "Section 1".

    Headings may have any numbers, in any order.
    """
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", response)) >= num_sections


def json_format(response: str) -> bool:
    """Return whether the whole response is JSON, with or without a Markdown fence."""
    text = response.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def title(response: str) -> bool:
    """Return whether a line has a <<title>> that is not empty."""
    for line in response.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end - 2 and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


def two_responses(response: str) -> bool:
    """Return whether six asterisks separate two different texts; asterisks may also open and close the response."""
    found = _divided(response, _RESPONSE_DIVIDER)
    return len(found) == 2 and found[0] != found[1]


CHECKS: Mapping[str, Callable[..., bool]] = {
    # Keywords may occur within words.
    "keywords:existence": lambda response, keywords: all(_occurs(re.escape(word), response) for word in keywords),
    "keywords:frequency": lambda response, keyword, frequency, relation: _compare(
        len(re.findall(re.escape(keyword.strip()), response, re.IGNORECASE)), relation, frequency
    ),
    "keywords:forbidden_words": lambda response, forbidden_words: (
        not any(_occurs(rf"\b{re.escape(word)}\b", response) for word in forbidden_words)
    ),
    "keywords:letter_frequency": lambda response, letter, let_frequency, let_relation: _compare(
        response.lower().count(letter.lower()), let_relation, let_frequency
    ),
    "language:response_language": is_in_language,
    "length_constraints:number_words": lambda response, num_words, relation: _compare(
        count_words(response), relation, num_words
    ),
    "length_constraints:number_sentences": lambda response, num_sentences, relation: _compare(
        count_sentences(response), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": lambda response: any(answer in response for answer in _ANSWERS),
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": lambda response, prompt_to_repeat: (
        response.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda response, end_phrase: (
        response.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": lambda response: re.fullmatch(r'\s*".*"\s*', response, re.DOTALL) is not None,
    "change_case:capital_word_frequency": lambda response, capital_frequency, capital_relation: _compare(
        count_capital_words(response), capital_relation, capital_frequency
    ),
    "change_case:english_capital": lambda response: response.isupper() and is_in_language(response, "en"),
    "change_case:english_lowercase": lambda response: response.islower() and is_in_language(response, "en"),
    "punctuation:no_comma": lambda response: "," not in response,
}


@functools.lru_cache(maxsize=32)  # Several instructions ask for the language of one response.
def detected_language(text: str) -> str | None:
    """Return the code of the likeliest language, or None for a text without letters."""
    import langdetect  # Only scoring processes need it.

    langdetect.DetectorFactory.seed = 0  # Without a seed, the result for one text differs from call to call.
    try:
        code: str = langdetect.detect(text)
    except langdetect.LangDetectException:
        return None
    return code


def count_words(text: str) -> int:
    """Count runs of letters, digits and underscores."""
    return sum(1 for _ in _WORD.finditer(text))


def count_capital_words(text: str) -> int:
    """Count words with a capital and without a small letter; a hyphen or an apostrophe does not end a word."""
    return sum(word.isupper() for word in _NOT_IN_WORDS.split(text))


def count_sentences(text: str) -> int:
    """Count the parts between ends of sentences, and the part after the last, that have a letter or a digit."""
    count, start = 0, 0
    for mark in _MARKS.finditer(text):
        if _ends_sentence(text, mark):
            count += _WORD.search(text, start, mark.start()) is not None
            start = mark.end()
    return count + (_WORD.search(text, start) is not None)


def _ends_sentence(text: str, mark: re.Match[str]) -> bool:
    """Return whether a sentence ends at these marks, by the text before and after them."""
    marks = mark.group()
    if marks[0] in _OTHER_SCRIPTS:
        return True

    # Closing quotes and brackets belong to the sentence. A mark inside a word, as in 3.14, does not end one.
    closing = _CLOSING.match(text, mark.end())
    after = closing.end() if closing else mark.end()
    if after == mark.end() < len(text) and not text[after].isspace():
        return False
    if "?" in marks or "!" in marks:
        return True

    # Three dots may trail off. One or two dots after white space do not belong to a sentence.
    found = _NEXT_WORD.match(text, after)
    next_word = found.group(1) if found else ""
    if marks in (".", "..") and (mark.start() == 0 or text[mark.start() - 1].isspace()):
        return False
    if marks != ".":
        return not next_word or next_word[0].isupper()

    # A full stop may belong to the word before it, and then ends a sentence only if one clearly begins.
    word = text[max(0, mark.start() - _MAX_ABBREVIATION) : mark.start()].split()[-1].lstrip(_OPENING).lower()
    if word in _ABBREVIATIONS or _DOTTED.fullmatch(word) or (len(word) == 1 and word.isalpha()):
        return not next_word or (next_word[0].isupper() and next_word.lower() in _STARTERS)

    # After a number, a small letter shows that the sentence continues ("the 3. item"). "1. Item" is a list item.
    return not (word.isdigit() and next_word[:1].islower())
