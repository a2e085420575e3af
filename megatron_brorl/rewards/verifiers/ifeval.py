"""Verifier `ifeval`: the share of a row's instructions that a response follows, with the 25 checks of IFEval.

The checks follow Zhou et al. 2023 (arXiv 2311.07911). Each one takes the response and the arguments in the data row.
Words and sentences are counted by fixed rules in linear time. The published program uses nltk, whose models change with
its version. docs/verifiers_ifeval.md describes the metadata of a row.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.extract import after_thought
from megatron_brorl.rewards.verifier import MAX_PARTS, Score, Verifier, VerifierRow


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


LESS_THAN = "less than"
AT_LEAST = "at least"
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

# Marks that can end a sentence. The marks of other scripts always end one.
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
# After an abbreviation, these words start a new sentence if they begin with a capital letter. Names do not.
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
    """Return whether the response is in a language. As in the published program, text without letters matches."""
    return detected_language(response) in (None, language)


def _divided(text: str, divider: re.Pattern[str]) -> list[str]:
    """Return the non-empty parts of a divided text, or [] if a part between two dividers is empty."""
    parts = [part.strip() for part in divider.split(text)]
    return [part for part in parts if part] if all(parts[1:-1]) else []


def number_paragraphs(response: str, num_paragraphs: int) -> bool:
    """Return whether the dividers *** separate exactly num_paragraphs paragraphs."""
    return len(_divided(response, _PARAGRAPH_DIVIDER)) == num_paragraphs


def nth_paragraph_first_word(response: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Check the number of paragraphs, which empty lines separate, and the first word of the n-th.

    As in the published program, empty paragraphs do not count towards the number but have an index.
    """
    paragraphs = [paragraph.strip() for paragraph in response.split("\n\n")]
    if sum(map(bool, paragraphs)) != num_paragraphs or nth_paragraph > num_paragraphs:
        return False
    words = paragraphs[nth_paragraph - 1].split()
    return bool(words) and _FIRST_WORD_END.split(words[0].lstrip("'").lstrip('"'))[0].lower() == first_word.lower()


def number_placeholders(response: str, num_placeholders: int) -> bool:
    """Return whether the response has at least num_placeholders [placeholders], each within one line."""
    # Count the closing brackets that have an opening bracket after the previous closing one.
    return sum("[" in part for line in response.split("\n") for part in line.split("]")[:-1]) >= num_placeholders


def postscript(response: str, postscript_marker: str) -> bool:
    """Return whether the marker occurs in any case. P.S. and P.P.S may contain spaces."""
    marker = postscript_marker.strip()
    text = response.lower()
    pattern = _POSTSCRIPTS.get(marker)
    return pattern.search(text) is not None if pattern else marker.lower() in text


def number_bullet_lists(response: str, num_bullets: int) -> bool:
    """Return whether exactly num_bullets lines begin with * or -. A line that begins with ** does not count."""
    return sum(len(bullet.findall(response)) for bullet in _BULLETS) == num_bullets


def number_highlighted_sections(response: str, num_highlights: int) -> bool:
    """Return whether the response has at least num_highlights nonempty *highlights* and **highlights**."""
    highlights = [text for pattern in _HIGHLIGHTS for text in pattern.findall(response)]
    return sum(bool(text.strip()) for text in highlights) >= num_highlights


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
        start = line.find("<<")
        end = line.rfind(">>")
        if 0 <= start < end - 2 and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


def two_responses(response: str) -> bool:
    """Return whether six asterisks separate two different texts. They may also begin and end the response."""
    parts = _divided(response, _RESPONSE_DIVIDER)
    return len(parts) == 2 and parts[0] != parts[1]


CHECKS: Mapping[str, Callable[..., bool]] = {
    # Keywords also count inside words.
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


@functools.lru_cache(maxsize=32)  # several instructions of a row check the language
def detected_language(text: str) -> str | None:
    """Return the code of the most likely language, or None for a text without letters."""
    import langdetect  # only worker processes need it

    langdetect.DetectorFactory.seed = 0  # without a seed, results differ between calls
    try:
        return str(langdetect.detect(text))
    except langdetect.LangDetectException:
        return None


def count_words(text: str) -> int:
    """Count runs of letters, digits and underscores."""
    return sum(1 for _ in _WORD.finditer(text))


def count_capital_words(text: str) -> int:
    """Count words in capital letters. Hyphens and apostrophes do not end a word."""
    return sum(word.isupper() for word in _NOT_IN_WORDS.split(text))


def count_sentences(text: str) -> int:
    """Count sentences, including an unfinished last one. Sentences without a letter or digit do not count."""
    count, start = 0, 0
    for mark in _MARKS.finditer(text):
        if _ends_sentence(text, mark):
            count += _WORD.search(text, start, mark.start()) is not None
            start = mark.end()
    return count + (_WORD.search(text, start) is not None)


def _ends_sentence(text: str, mark: re.Match[str]) -> bool:
    """Return whether a sentence ends at these marks, judging by the text before and after them."""
    marks = mark.group()
    if marks[0] in _OTHER_SCRIPTS:
        return True

    # Closing quotes and brackets belong to the sentence. A mark inside a word, as in 3.14, does not end the sentence.
    closing = _CLOSING.match(text, mark.end())
    after = closing.end() if closing else mark.end()
    if after == mark.end() and after < len(text) and not text[after].isspace():
        return False
    if "?" in marks or "!" in marks:
        return True

    # Several dots end a sentence only before a capital letter or at the end. One or two dots after a space never do.
    match = _NEXT_WORD.match(text, after)
    next_word = match.group(1) if match else ""
    if marks in (".", "..") and (mark.start() == 0 or text[mark.start() - 1].isspace()):
        return False
    if marks != ".":
        return not next_word or next_word[0].isupper()

    # After an abbreviation, a full stop ends the sentence only if the next word clearly starts a new one.
    word = text[max(0, mark.start() - _MAX_ABBREVIATION) : mark.start()].split()[-1].lstrip(_OPENING).lower()
    if word in _ABBREVIATIONS or _DOTTED.fullmatch(word) or (len(word) == 1 and word.isalpha()):
        return not next_word or (next_word[0].isupper() and next_word.lower() in _STARTERS)

    # After a number, the sentence continues with a small letter ("the 3. item"). "1. Item" is a list item.
    return not (word.isdigit() and next_word[:1].islower())


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


class _Condition(NamedTuple):
    """A condition on an argument, and its description for messages."""

    accepts: Callable[[Any], bool]
    meaning: str


_COUNT = _Condition(_is_count, "a whole number of at least 0")
_ORDINAL = _Condition(lambda v: _is_count(v) and v > 0, "a whole number of at least 1")
_TEXT = _Condition(_is_text, "a string that is not empty")
_TEXTS = _Condition(lambda v: isinstance(v, list) and bool(v) and all(map(_is_text, v)), "a list of strings")
_RELATION = _Condition(lambda v: v in (AT_LEAST, LESS_THAN), f'"{AT_LEAST}" or "{LESS_THAN}"')
_CONDITIONS: Mapping[str, _Condition] = {
    **dict.fromkeys(("relation", "let_relation", "capital_relation"), _RELATION),
    **dict.fromkeys(("num_paragraphs", "nth_paragraph"), _ORDINAL),
    **dict.fromkeys(("keywords", "forbidden_words"), _TEXTS),
    **dict.fromkeys(("keyword", "first_word", "postscript_marker", "section_spliter", "prompt_to_repeat"), _TEXT),
    "end_phrase": _TEXT,
    "letter": _Condition(lambda v: _is_text(v) and len(v) == 1, "one character"),
    "language": _Condition(lambda v: isinstance(v, str) and v in LANGUAGES, f"one of {' '.join(sorted(LANGUAGES))}"),
}


def find(response: str) -> str | None:
    """Return the text after the last </think>, or None if it is empty."""
    return after_thought(response).strip() or None


def load() -> Verifier:
    """Return the verifier. Loads the language profiles of langdetect first, which is slow."""
    detected_language("the profiles are read at the first call")
    return verify


def verify(answer: str, row: VerifierRow) -> Score:
    """Return the share of the row's instructions that the answer follows, with one part per instruction."""
    metadata = row["metadata"]
    if count_words(answer) < metadata.get("min_words", 0):
        return Score(0.0, f"fewer than {metadata['min_words']} words (min_words)")

    readings = loose_readings(answer) if metadata.get("mode") == "loose" else [answer]
    parts: dict[str, float] = {}
    for kind, arguments in zip(metadata["instruction_id_list"], metadata["kwargs"], strict=True):
        count = sum(name.partition("#")[0] == kind for name in parts)
        name = f"{kind}#{count + 1}" if count else kind
        parts[name] = float(any(follows(kind, _without_nulls(arguments), reading) for reading in readings))

    failed = [name for name, part in parts.items() if not part]
    reason = f"not followed: {', '.join(failed)}" if failed else ""
    reward = float(not failed) if metadata.get("all") else 1 - len(failed) / len(parts)
    return Score(reward, reason, parts)


def follows(kind: str, arguments: Mapping[str, Any], response: str) -> bool:
    """Return whether a response follows an instruction. An empty response follows none."""
    return bool(response.strip()) and CHECKS[kind](response, **arguments)


def loose_readings(response: str) -> list[str]:
    """Return the response and the variants that the published loose accuracy also accepts."""
    lines = response.split("\n")
    readings = [response, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return list(dict.fromkeys([*readings, *(text.replace("*", "") for text in readings)]))


def check_row(row: VerifierRow, where: str) -> None:
    """Raise UserError unless metadata has known instructions with valid arguments."""
    metadata = row["metadata"]
    kinds, kwargs = metadata.get("instruction_id_list"), metadata.get("kwargs")
    if not isinstance(kinds, list) or not kinds or not all(isinstance(kind, str) for kind in kinds):
        raise UserError(
            f'{where}: verifier "ifeval" needs metadata.instruction_id_list, a list of instruction ids such as '
            '"punctuation:no_comma"'
        )
    if len(kinds) > MAX_PARTS:
        raise UserError(
            f"{where}: metadata.instruction_id_list has {len(kinds)} instructions, but a reward has at most "
            f"{MAX_PARTS} parts; remove some"
        )
    if not isinstance(kwargs, list) or len(kwargs) != len(kinds):
        raise UserError(
            f'{where}: verifier "ifeval" needs metadata.kwargs, a list of {len(kinds)} objects, one per instruction'
        )
    for index, (kind, arguments) in enumerate(zip(kinds, kwargs, strict=True)):
        _check_instruction(kind, arguments, where, index)

    mode = metadata.get("mode", "strict")
    needs_all = metadata.get("all", False)
    min_words = metadata.get("min_words", 0)
    if mode not in ("strict", "loose"):
        raise UserError(f'{where}: metadata.mode is {mode!r}; use "strict" or "loose"')
    if not isinstance(needs_all, bool):
        raise UserError(f"{where}: metadata.all is {needs_all!r}; use true or false")
    if not _is_count(min_words):
        raise UserError(f"{where}: metadata.min_words is {min_words!r}; use {_COUNT.meaning}")


def _check_instruction(kind: str, arguments: Any, where: str, index: int) -> None:
    if kind not in CHECKS:
        close = difflib.get_close_matches(kind, CHECKS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(CHECKS)}"
        raise UserError(f"{where}: metadata.instruction_id_list[{index}]: no instruction is called {kind!r}; {hint}")

    key = f"{where}: metadata.kwargs[{index}] ({kind})"
    if not isinstance(arguments, dict):
        raise UserError(f"{key} is {arguments!r}; use an object, {{}} for no arguments")
    values = _without_nulls(arguments)
    parameters = list(inspect.signature(CHECKS[kind]).parameters)[1:]
    if unknown := [name for name in values if name not in parameters]:
        takes = ", ".join(parameters) or "no arguments"
        raise UserError(f"{key} has {unknown[0]!r}, but the instruction takes {takes}; remove it")
    for name in parameters:
        condition = _CONDITIONS.get(name, _COUNT)
        if name not in values:
            raise UserError(f"{key} lacks {name!r}, {condition.meaning}; add it")
        if not condition.accepts(values[name]):
            raise UserError(f"{key} has {name} = {values[name]!r}; it must be {condition.meaning}")
    if values.get("nth_paragraph", 0) > values.get("num_paragraphs", 0):
        raise UserError(f"{key} has nth_paragraph above num_paragraphs, which no response can follow; lower it")


def _without_nulls(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Remove nulls. Files in columns have every argument for every instruction."""
    return {name: value for name, value in arguments.items() if value is not None}
