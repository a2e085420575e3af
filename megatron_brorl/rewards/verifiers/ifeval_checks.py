"""The 25 instruction checks of IFEval (Zhou et al. 2023, arXiv 2311.07911).

Every check takes the response and the arguments that a data set names. Words and sentences are counted by fixed rules
in linear time; the published program counts them with nltk, whose models change with its version.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence


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
_PARAGRAPH_DIVIDER = re.compile(r"\s?\*\*\*\s?")
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


def keywords_existence(response: str, keywords: Sequence[str]) -> bool:
    """Return whether every keyword occurs, also within a word."""
    return all(re.search(re.escape(keyword), response, re.IGNORECASE) for keyword in keywords)


def keywords_frequency(response: str, keyword: str, frequency: int, relation: str) -> bool:
    """Compare how often a keyword occurs, also within words."""
    found = re.findall(re.escape(keyword.strip()), response, re.IGNORECASE)
    return _compare(len(found), relation, frequency)


def forbidden_words(response: str, forbidden_words: Sequence[str]) -> bool:
    """Return whether none of the words occurs as a word of its own."""
    return not any(re.search(rf"\b{re.escape(word)}\b", response, re.IGNORECASE) for word in forbidden_words)


def letter_frequency(response: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    """Compare how often a letter occurs in either case."""
    return _compare(response.lower().count(letter.lower()), let_relation, let_frequency)


def response_language(response: str, language: str) -> bool:
    """Return whether the response is in a language. A text without letters is in every language, as published."""
    return detected_language(response) in (None, language)


def number_words(response: str, num_words: int, relation: str) -> bool:
    """Compare the number of words."""
    return _compare(count_words(response), relation, num_words)


def number_sentences(response: str, num_sentences: int, relation: str) -> bool:
    """Compare the number of sentences."""
    return _compare(count_sentences(response), relation, num_sentences)


def number_paragraphs(response: str, num_paragraphs: int) -> bool:
    """Return whether the dividers *** separate exactly num_paragraphs paragraphs.

    The text before the first divider and after the last one may be empty. Other empty paragraphs fail the check.
    """
    first, *others = (part.strip() for part in _PARAGRAPH_DIVIDER.split(response))
    inner, last = others[:-1], others[-1:]
    return all(inner) and len(inner) + sum(map(bool, (first, *last))) == num_paragraphs


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


def constrained_response(response: str) -> bool:
    """Return whether the response has one of the three published answers."""
    return any(answer in response for answer in _ANSWERS)


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
    first, *others = (part.strip() for part in response.split("******"))
    inner, last = others[:-1], others[-1:]
    found = [part for part in (first, *inner, *last) if part]
    return all(inner) and len(found) == 2 and found[0] != found[1]


def repeat_prompt(response: str, prompt_to_repeat: str) -> bool:
    """Return whether the response begins with the prompt in either case."""
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(response: str, end_phrase: str) -> bool:
    """Return whether the response ends with a phrase, ignoring case and quotes around the response."""
    return response.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def quotation(response: str) -> bool:
    """Return whether double quotes enclose the whole response."""
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def capital_word_frequency(response: str, capital_frequency: int, capital_relation: str) -> bool:
    """Compare the number of words in capital letters."""
    return _compare(count_capital_words(response), capital_relation, capital_frequency)


def english_capital(response: str) -> bool:
    """Return whether the response is English without a small letter."""
    return response.isupper() and response_language(response, "en")


def english_lowercase(response: str) -> bool:
    """Return whether the response is English without a capital letter."""
    return response.islower() and response_language(response, "en")


def no_comma(response: str) -> bool:
    """Return whether the response has no comma."""
    return "," not in response


CHECKS: Mapping[str, Callable[..., bool]] = {
    "keywords:existence": keywords_existence,
    "keywords:frequency": keywords_frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_words": number_words,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
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


def _compare(count: int, relation: str, threshold: int) -> bool:
    return count < threshold if relation == LESS_THAN else count >= threshold


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
