"""Words and sentences by fixed rules: the same count on every machine, in time linear in the text.

docs/verifiers_ifeval.md says where the counts differ from those of nltk, which the published program uses.
"""

from __future__ import annotations

import re

_WORD = re.compile(r"\w+")
_NOT_IN_WORDS = re.compile(r"[\s,:;@#$%&?!*()\[\]{}<>\"`«»“”„\u2012-\u2015]+|--+|\.\.+|…")

# Marks after which a sentence may end. Those of other scripts, full-width ! and ? among them, end one whatever follows.
_ELSEWHERE = "。\uff01\uff1f।"
_MARKS = re.compile(rf"[.?!…]+|[{_ELSEWHERE}]+")
_OPENERS = "\"'([{*_“\u2018«»"
_CLOSERS = re.compile(r"[\"')\]}*_”\u2019»«]*")  # German has »these« and French «these»
_NEXT = re.compile(r"[^\w.?!…]{0,24}(\w+)")
_BEFORE = 24  # characters in which the word before a full stop is looked for: no abbreviation is longer


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_DOTTED = re.compile(r"(?:[^\W\d_]\.)+[^\W\d_]")  # u.s, e.g, p.m; its last dot is the mark
_ABBREVIATIONS = _words(
    "mr mrs ms dr prof rev hon gen col capt lt sgt gov sen rep pres st jr sr messrs "  # of persons
    "jan feb apr jun jul aug sep sept oct nov dec mon tue tues wed thu thur thurs fri "
    "inc ltd co corp bros dept univ assn est ave blvd rd mt ft "  # of companies and places
    "vs etc al cf approx ca fig figs vol vols ed eds pp ch sec ph.d"
)
# With a capital after an abbreviation, these begin a sentence; a name does not.
_STARTERS = _words(
    "a an the this that these those he she it we they you i his her its our their my your there here if when while "
    "and but or so yet then thus however also in on at for from with after before since as although though because "
    "what who why how where most some many each every both no not please"
)


def count_words(text: str) -> int:
    """Runs of letters, digits and underscores."""
    return sum(1 for _ in _WORD.finditer(text))


def capital_words(text: str) -> int:
    """Words that have a capital letter and no small one; a hyphen or an apostrophe does not end a word."""
    return sum(word.isupper() for word in _NOT_IN_WORDS.split(text))


def count_sentences(text: str) -> int:
    """Pieces with a letter or digit between the ends of sentences; what follows the last end is one too."""
    count, start = 0, 0
    for mark in _MARKS.finditer(text):
        if _ends_sentence(text, mark):
            count += _WORD.search(text, start, mark.start()) is not None
            start = mark.end()
    return count + (_WORD.search(text, start) is not None)


def _ends_sentence(text: str, mark: re.Match[str]) -> bool:
    """Whether a sentence ends at these marks, by what stands before and after them."""
    # Quotes and brackets that close belong to the sentence. Inside a word, as in 3.14, no mark ends one.
    marks = mark.group()
    if marks[0] in _ELSEWHERE:
        return True
    closers = _CLOSERS.match(text, mark.end())
    after = closers.end() if closers else mark.end()
    if after == mark.end() < len(text) and not text[after].isspace():
        return False
    if "?" in marks or "!" in marks:
        return True

    # Three dots may trail off; one or two after white space are not of any sentence.
    found = _NEXT.match(text, after)
    next_word = found.group(1) if found else ""
    if marks in (".", "..") and (mark.start() == 0 or text[mark.start() - 1].isspace()):
        return False
    if marks != ".":
        return not next_word or next_word[0].isupper()

    # A full stop may belong to the word before it, and then ends a sentence only where one clearly begins.
    before = text[max(0, mark.start() - _BEFORE) : mark.start()].split()
    word = before[-1].lstrip(_OPENERS).lower()
    if word in _ABBREVIATIONS or _DOTTED.fullmatch(word) or (len(word) == 1 and word.isalpha()):
        return not next_word or (next_word[0].isupper() and next_word.lower() in _STARTERS)
    return not (word.isdigit() and next_word[:1].islower())  # "the 3. item", but "1. Item" as in a list
