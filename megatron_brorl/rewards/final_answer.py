r"""Where a response says its answer, and which it is. Linear in the response.

What follows the last </think>, or the whole response, is searched for the first of these forms that it has:

    <answer>42</answer>    \boxed{42} or \fbox{42}    #### 42    The answer is 42. / Answer: 42

Several places of that form must say the same; different ones are no answer, or a policy would learn to list guesses.
No number is an answer only because it is the last one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

from megatron_brorl.rewards.extract import after_thought
from megatron_brorl.rewards.plain_number import NOT_DRESS
from megatron_brorl.rewards.spelling import plain_text, quote

Same = Callable[[str, str], bool]  # whether two texts say the same answer
Counts = Callable[[str], bool]  # whether a text can be an answer of the kind that is looked for

_TAG = re.compile(r"<answer>((?:(?!<answer>|</answer>).)*)</answer>", re.DOTALL)
_BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s{0,4}\{)|\\.|[{}]", re.DOTALL)
# A number or an option after four hashes, as GSM8K ends its solutions; "#### 2. Next" is a heading of Markdown.
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
    """Whether two texts are one but for dress and white space."""
    return a.strip() == b.strip() or plain_text(a) == plain_text(b)


def final_answer(response: str, same: Same = same_text, counts: Counts | None = None) -> str | None:
    """Return the answer that a response says in one of the forms above; None if it says none, or different ones."""
    said = places(response, counts)
    return said[-1] if said and disagreement(said, same) is None else None


def final_or_bare_answer(response: str, same: Same, max_chars: int, counts: Counts | None = None) -> str | None:
    """As final_answer; a response in none of the forms is its own answer where it is one line of max_chars at most."""
    if places(response):
        return final_answer(response, same, counts)
    bare = response.strip()
    return bare if bare and len(bare) <= max_chars and "\n" not in bare else None


def places(response: str, counts: Counts | None = None) -> list[str]:
    """Return what each place of the first form found in a response says, in order; empty where it has no form.

    Places for which `counts` is false are left out, unless it is false for every place of every form.
    """
    text = after_thought(response)
    first: list[str] = []
    for form in (_tags, _boxes, _hashes, _sentences):
        found = [answer for answer in (part.strip() for part in form(text)) if answer]
        if found and form is _tags:
            found = [answer for tag in found for answer in places(tag, counts) or [tag]]

        # A response with many spellings has no answer, so none of them is looked into.
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
    """In words, the first two answers that differ; None where all agree.

    Many spellings, or long ones, are not looked into: a hostile response could make that dear.
    """
    first, *others = dict.fromkeys(said) or [""]
    for count, other in enumerate(others):
        if count >= _MAX_SPELLINGS or max(len(first), len(other)) > _MAX_SENTENCE or not same(first, other):
            return f"no answer: two different ones, {quote(first)} and {quote(other)}"
    return None


def _tags(text: str) -> list[str]:
    return _TAG.findall(text) if "</answer>" in text else []


def _boxes(text: str) -> list[str]:
    """The contents of the boxes that are closed and stand in no other closed box."""
    if "\\boxed" not in text and "\\fbox" not in text:
        return []
    open_braces: list[int] = []  # where the content of a box starts; -1 for another brace
    spans: list[tuple[int, int]] = []
    for token in _BRACES.finditer(text):
        if token["box"]:
            open_braces.append(token.end())
        elif token[0] == "{":
            open_braces.append(-1)
        elif token[0] == "}" and open_braces and (start := open_braces.pop()) >= 0:
            while spans and spans[-1][0] > start:
                spans.pop()
            spans.append((start, token.start()))
    return [text[start:end] for start, end in spans]


def _hashes(text: str) -> list[str]:
    return [_without_aside(markup, line) for markup, line in _HASHES.findall(text)] if "####" in text else []


def _without_aside(markup: str, line: str) -> str:
    """Return what stands after four hashes without its markup, a reason, and words that do not change the number."""
    line = _REASON.sub("", _MARKUP.sub("", line) if markup else line)
    last = _TO_LAST_DIGIT.match(line)
    aside = _ASIDE.search(line, last.end() if last else 0)
    return line[: aside.start()] if aside and not NOT_DRESS.search(line, aside.start()) else line


def _sentences(text: str) -> list[str]:
    """What follows "answer is" and "Answer:", to the end of the sentence, the line or the displayed formula."""
    marks = list(_SAYS.finditer(text))
    found = []
    for mark, following in itertools.zip_longest(marks, marks[1:]):
        # White space, colons and stars may part the words from the answer.
        start = mark.end()
        while start < len(text) and text[start] in " \t\r\n:*_":
            start += 1

        # A window, so that a thousand such words without an end cost no more than their text.
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
