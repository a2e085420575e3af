r"""Find the final answer of a response in linear time.

The search covers the text after the last </think>, or the whole response without such a tag. The answer is in the
first of these forms that occurs in the text:

    <answer>42</answer>    \boxed{42} or \fbox{42}    #### 42    The answer is 42. / Answer: 42

If this form occurs several times, all occurrences must give the same answer. Otherwise the response has no answer,
because a policy would learn to list guesses. The last number of a response is not an answer unless it has one of these
forms.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

from megatron_brorl.rewards.answer_text import plain_text, quote
from megatron_brorl.rewards.extract import after_thought, boxes, tags
from megatron_brorl.rewards.plain_number import CHANGES_NUMBER

Same = Callable[[str, str], bool]  # whether two texts say the same answer
Counts = Callable[[str], bool]  # whether a text can be an answer of the kind that is looked for

# GSM8K ends its solutions with four hashes. "#### 2. Next" is a heading of Markdown.
_HASHES = re.compile(
    r"(?<!#)####:?[ \t]{0,8}([*_`]{0,3})(?!\d+[.):][ \t]+\S)"
    r"((?:[a-zA-Z]?[ \t]?=[ \t]?)?[-+$€£\\(]{0,4}\.?\d[^\n]*|\(?[A-J]\)?(?=[*_`.]{0,4}\s*(?:\n|$)))"
)
_MARKUP = re.compile(r"(?<=\S)[*_`]{1,3}(?=[\s.,;:(]|$)")
_REASON = re.compile(r",?[ \t](?:because|since|as)\b.*")
_ASIDE = re.compile(r"[,;:(]|\.\s|\s[-\u2013\u2014]+\s|</?s>|<\|")
_TO_LAST_DIGIT = re.compile(r".*\d|.")
_SAYS = re.compile(
    r"\banswer\b(?:[*_]{0,2}\s?[*_]{0,2}(?:is|are|=|:)(?![A-Za-z])| (?:to|for) [^.:\n]{1,80}? is\b)", re.IGNORECASE
)
_LEADS_ON = re.compile(r"\W*(?:(?:the|my|our|so|thus|hence|therefore|final|correct|right)\W+)*", re.IGNORECASE)
_MAX_SENTENCE = 1000  # characters
_MAX_SPELLINGS = 8
_DISPLAY = {"\\[": "\\]", "$$": "$$"}
_SENTENCE_END = re.compile(r"[.!?](?=[*_)\"']{0,3}(?:\s|$))|\n")


def same_text(a: str, b: str) -> bool:
    """Return whether two texts differ only in appearance and white space."""
    return a.strip() == b.strip() or plain_text(a) == plain_text(b)


def final_answer(response: str, same: Same = same_text, counts: Counts | None = None) -> str | None:
    """Return the answer of a response in one of the forms above; None if there is none, or different ones."""
    said = places(response, counts)
    return said[-1] if said and disagreement(said, same) is None else None


def final_or_bare_answer(response: str, same: Same, max_chars: int, counts: Counts | None = None) -> str | None:
    """Return final_answer, or a response in none of the forms if it is one line of at most max_chars."""
    if places(response):
        return final_answer(response, same, counts)
    bare = response.strip()
    return bare if bare and len(bare) <= max_chars and "\n" not in bare else None


def places(response: str, counts: Counts | None = None) -> list[str]:
    """Return the answer in each place of the first form that a response has, in order.

    Places for which `counts` is false are left out, unless it is false for every place of every form.
    """
    text = after_thought(response)
    first: list[str] = []
    for form in (tags, boxes, _hashes, _sentences):
        found = [answer for answer in (part.strip() for part in form(text)) if answer]
        if found and form is tags:
            found = [answer for tag in found for answer in places(tag, counts) or [tag]]

        # Do not call `counts` for each of many spellings, because that could take long.
        spellings = dict.fromkeys(found)
        if counts is None or len(spellings) > _MAX_SPELLINGS:
            counting = spellings
        else:
            counting = {answer: None for answer in spellings if counts(answer)}
        if counting:
            return [answer for answer in found if answer in counting]
        first = first or found
    return first


def disagreement(said: list[str], same: Same) -> str | None:
    """Return a sentence about the first two answers that differ, or None.

    Many spellings, or long ones, count as different, because comparing them could take long.
    """
    first, *others = dict.fromkeys(said) or [""]
    for count, other in enumerate(others):
        if count >= _MAX_SPELLINGS or max(len(first), len(other)) > _MAX_SENTENCE or not same(first, other):
            return f"no answer: two different ones, {quote(first)} and {quote(other)}"
    return None


def _hashes(text: str) -> list[str]:
    return [_without_aside(markup, line) for markup, line in _HASHES.findall(text)] if "####" in text else []


def _without_aside(markup: str, line: str) -> str:
    """Remove markup, a reason, and words that do not change the number from the text after four hashes."""
    line = _REASON.sub("", _MARKUP.sub("", line) if markup else line)
    last = _TO_LAST_DIGIT.match(line)
    aside = _ASIDE.search(line, last.end() if last else 0)
    return line[: aside.start()] if aside and not CHANGES_NUMBER.search(line, aside.start()) else line


def _sentences(text: str) -> list[str]:
    """Return what follows "answer is" and "Answer:", to the end of the sentence, the line or the displayed formula."""
    marks = list(_SAYS.finditer(text))
    found = []
    for mark, following in itertools.zip_longest(marks, marks[1:]):
        start = mark.end()
        while start < len(text) and text[start] in " \t\r\n:*_":
            start += 1

        # A window limits the cost of a thousand such words without an end.
        window = text[start : start + _MAX_SENTENCE]
        closing = _DISPLAY.get(window[:2])
        if closing:
            window = window[2:]
            end = window.find(closing)
        else:
            match = _SENTENCE_END.search(window)
            end = match.start() if match else -1
        said = window[:end] if end >= 0 else window

        # "Answer: The answer is 42" says it once; "The answer is 41, no, the answer is 42" twice.
        if following and following.start() < start + len(said):
            said = text[start : following.start()]
            if _LEADS_ON.fullmatch(said):
                continue
        found.append(said)
    return found
