r"""Find the answer in a response.

reward.extract selects one of FINDERS, or the verifier's own function (verifier.Entry.find). Verifiers that compare an
answer with a reference use `final_answer`. docs/verifiers_math.md states where it searches. If a response gives several
answers in the same form, all must be equal, so that a policy cannot learn to list guesses.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from megatron_brorl.rewards.answer_text import CHANGES_NUMBER, plain_text, quote
from megatron_brorl.rewards.verifier import Find

Same = Callable[[str, str], bool]  # whether two texts are the same answer
Predicate = Callable[[str], bool]

_MAX_RESPONSE = 1 << 20  # characters; longer responses are not searched
_TAG = re.compile(r"<answer>((?:(?!<answer>|</answer>).)*)</answer>", re.DOTALL)
_BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s{0,4}\{)|\\.|[{}]", re.DOTALL)

# GSM8K ends its solutions with "#### 42". The pattern excludes Markdown headings such as "#### 2. Next".
_HASHES = re.compile(
    r"(?<!#)####:?[ \t]{0,8}([*_`]{0,3})(?!\d+[.):][ \t]+\S)"
    r"((?:[a-zA-Z]?[ \t]?=[ \t]?)?[-+$€£\\(]{0,4}\.?\d[^\n]*|\(?[A-J]\)?(?=[*_`.]{0,4}\s*(?:\n|$)))"
)
_MARKUP = re.compile(r"(?<=\S)[*_`]{1,3}(?=[\s.,;:(]|$)")
_REASON = re.compile(r",?[ \t](?:because|since|as)\b.*")
_ASIDE = re.compile(r"[,;:(]|\.\s|\s[-\u2013\u2014]+\s|</?s>|<\|")
_TO_LAST_DIGIT = re.compile(r".*\d|.")

_MAX_LINE = 300  # characters
_MAX_SENTENCE = 1000  # characters
_MAX_SPELLINGS = 8  # different texts of one answer that are compared
_SAYS = re.compile(
    r"\banswer\b(?:[*_]{0,2}\s?[*_]{0,2}(?:is|are|=|:)(?![A-Za-z])| (?:to|for) [^.:\n]{1,80}? is\b)", re.IGNORECASE
)
# A displayed formula, or the rest of the sentence or line.
_SENTENCE = re.compile(
    r"\\\[(.*?)(?:\\\]|\Z)|\$\$(.*?)(?:\$\$|\Z)|(.*?)(?:[.!?](?=[*_)\"']{0,3}(?:\s|\Z))|\n|\Z)", re.DOTALL
)
_LEADS_ON = re.compile(r"\W*(?:(?:the|my|our|so|thus|hence|therefore|final|correct|right)\W+)*", re.IGNORECASE)


class Found(NamedTuple):
    """The answer in a response, or the reason why there is none."""

    answer: str | None
    no_answer_reason: str = ""


def after_thought(response: str) -> str:
    """Return the text after the last </think>, or the whole response without such a tag."""
    return response.rpartition("</think>")[2]


def tags(text: str) -> list[str]:
    """Return the contents of all <answer>...</answer>."""
    return _TAG.findall(text) if "</answer>" in text else []


def boxes(text: str) -> list[str]:
    r"""Return the contents of all closed \boxed{...} and \fbox{...} that are not inside another closed box."""
    if "\\boxed" not in text and "\\fbox" not in text:
        return []
    open_braces: list[int] = []  # start of the content for a box, -1 for any other brace
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


def _boxed(text: str) -> str | None:
    """Return the content of the only box."""
    contents = boxes(text)
    return contents[0] if len(contents) == 1 and text.count("\\boxed") == 1 else None


FINDERS: Mapping[Literal["full", "answer_tag", "boxed"], Find] = {
    "full": lambda text: text,
    "answer_tag": lambda text: next(reversed(tags(text)), None),  # the last one
    "boxed": _boxed,
}


def extract(text: str, find: Find, max_chars: int) -> Found:
    """Return the stripped answer that `find` finds, or the reason why it does not count."""
    if len(text) > _MAX_RESPONSE:
        return Found(None, f"the response has more than {_MAX_RESPONSE} characters")
    answer = find(text)
    if answer is None:
        return Found(None, "no answer in the response")
    answer = answer.strip()
    if len(answer) > max_chars:
        return Found(None, f"the answer has more than {max_chars} characters")
    return Found(answer)


def answer_hash(answer: str | None) -> int:
    """Return a hash below 2**52, which float64 represents exactly, or 0 for no answer."""
    if answer is None:
        return 0
    digest = hashlib.blake2b(answer.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 12 or 1


def same_text(a: str, b: str) -> bool:
    """Return whether two texts differ only in appearance and white space."""
    return a.strip() == b.strip() or plain_text(a) == plain_text(b)


def final_answer(response: str, same: Same, is_bare: Predicate, is_candidate: Predicate | None = None) -> str | None:
    """Return the answer of a response, or None if it has none or several different ones.

    A response in which `places` finds no answer is an answer itself if `is_bare` accepts it.
    """
    answers = places(response, is_candidate)
    if answers:
        return None if _disagreement(answers, same) else answers[-1]
    bare = response.strip()
    return bare if bare and is_bare(bare) else None


def is_short_line(text: str) -> bool:
    """Return whether a response is short enough to be an answer itself."""
    return len(text) <= _MAX_LINE and "\n" not in text


def given_answer(text: str, same: Same) -> tuple[str, str]:
    """Return the answer of a text, and the reason why it does not count, or "".

    text: a response, or only an answer.
    """
    answers = places(text) or [text.strip()]
    return answers[-1], _disagreement(answers, same)


def _disagreement(answers: list[str], same: Same) -> str:
    """Describe the first two answers that differ, or return "".

    More than _MAX_SPELLINGS spellings, or long ones, count as different to bound the time of the comparison.
    """
    first, *others = dict.fromkeys(answers)
    for count, other in enumerate(others):
        if count >= _MAX_SPELLINGS or max(len(first), len(other)) > _MAX_SENTENCE or not same(first, other):
            return f"no answer: two different ones, {quote(first)} and {quote(other)}"
    return ""


def places(response: str, is_candidate: Predicate | None = None) -> list[str]:
    """Return all answers in the first form that occurs in a response, in order.

    Answers that `is_candidate` rejects are skipped, unless it rejects every answer in every form.
    """
    text = after_thought(response)
    first_answers: list[str] = []
    for form in (tags, boxes, _hashes, _sentences):
        answers = list(filter(None, map(str.strip, form(text))))
        if form is tags:
            answers = [answer for tag in answers for answer in places(tag, is_candidate) or [tag]]

        # Skip the filter for many spellings to bound its time.
        spellings = set(answers)
        if is_candidate and len(spellings) <= _MAX_SPELLINGS:
            spellings = set(filter(is_candidate, spellings))
        if spellings:
            return [answer for answer in answers if answer in spellings]
        first_answers = first_answers or answers
    return first_answers


def _hashes(text: str) -> list[str]:
    """Return the texts after "####" without Markdown, a reason, and words that do not change the number."""
    texts = []
    for markup, rest in _HASHES.findall(text) if "####" in text else ():
        line = _REASON.sub("", _MARKUP.sub("", rest) if markup else rest)
        to_last_digit = _TO_LAST_DIGIT.match(line)
        aside = _ASIDE.search(line, to_last_digit.end() if to_last_digit else 0)
        texts.append(line[: aside.start()] if aside and not CHANGES_NUMBER.search(line, aside.start()) else line)
    return texts


def _sentences(text: str) -> list[str]:
    """Return the texts after "answer is" and "Answer:", up to the end of the sentence, line or displayed formula."""
    marks = list(_SAYS.finditer(text))
    answers = []
    for mark, following in itertools.zip_longest(marks, marks[1:]):
        # Limit the window, because a response may repeat "answer is" a thousand times without ending a sentence.
        window = text[mark.end() : following.start() if following else None].lstrip(" \t\r\n:*_")[:_MAX_SENTENCE]
        sentence = _SENTENCE.match(window)
        answer = sentence[sentence.lastindex or 0] if sentence else ""

        # "Answer: The answer is 42" has one answer; "The answer is 41, no, the answer is 42" has two.
        if not (following and answer == window and _LEADS_ON.fullmatch(answer)):
            answers.append(answer)
    return answers
