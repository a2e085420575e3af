r"""Functions that find the answer in a response. A verifier can also bring its own function (verifier.Entry.find).

full        the whole text
answer_tag  the content of the last <answer>...</answer>
boxed       the content of the only \boxed{...}

A response with several boxes has no answer for `boxed`, because a policy would otherwise learn to list guesses.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from megatron_brorl.rewards.verifier import Find

_TAG = re.compile(r"<answer>((?:(?!<answer>|</answer>).)*)</answer>", re.DOTALL)
_BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s{0,4}\{)|\\.|[{}]", re.DOTALL)
_MAX_RESPONSE = 1 << 20  # Characters. `extract` does not search longer responses.


class Found(NamedTuple):
    """The answer in a response, or the reason why there is none."""

    answer: str | None
    why: str = ""


def after_thought(response: str) -> str:
    """Return what follows the last </think>, or the whole response."""
    return response.rpartition("</think>")[2]


def tags(text: str) -> list[str]:
    """Return the contents of <answer>...</answer>."""
    return _TAG.findall(text) if "</answer>" in text else []


def boxes(text: str) -> list[str]:
    r"""Return the contents of \boxed{...} and \fbox{...} that are closed and not in another closed box."""
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


def full(text: str) -> str | None:
    """Return the whole text."""
    return text


def answer_tag(text: str) -> str | None:
    """Return the content of the last <answer>...</answer>."""
    found = tags(text)
    return found[-1] if found else None


def boxed(text: str) -> str | None:
    r"""Return the content of the only \boxed{...}."""
    found = boxes(text)
    return found[0] if len(found) == 1 and text.count("\\boxed") == 1 else None


FINDERS: Mapping[Literal["full", "answer_tag", "boxed"], Find] = {
    "full": full,
    "answer_tag": answer_tag,
    "boxed": boxed,
}


def extract(text: str, find: Find, max_chars: int) -> Found:
    """Return the answer that `find` finds, without white space at its ends. A longer one than max_chars is none."""
    if len(text) > _MAX_RESPONSE:
        return Found(None, f"the response has more than {_MAX_RESPONSE} characters")
    answer = find(text)
    if answer is None:
        return Found(None, "no answer in the response")
    answer = answer.strip()
    if len(answer) > max_chars:
        return Found(None, f"the answer has more than {max_chars} characters")
    return Found(answer)


def code(answer: str | None) -> int:
    """Return a hash of an answer below 2**52, which float64 tables hold exactly. 0 stands for no answer."""
    if answer is None:
        return 0
    digest = hashlib.blake2b(answer.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 12 or 1
