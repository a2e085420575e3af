r"""Which part of a response is the answer.

full        the whole text
answer_tag  what stands inside the last <answer>...</answer>
boxed       what stands inside the only \boxed{...}; several are no answer, or a policy would learn to list guesses
"""

from __future__ import annotations

import hashlib
from typing import Literal

_OPEN, _CLOSE = "<answer>", "</answer>"
_BOXED = "\\boxed{"


def extract(text: str, how: Literal["full", "answer_tag", "boxed"], max_chars: int) -> str | None:
    """The answer without white space at its ends; None where there is none or it has more than `max_chars`."""
    if how == "full":
        answer: str | None = text
    elif how == "answer_tag":
        answer = _last_tag(text)
    else:
        answer = _only_box(text)
    if answer is None:
        return None
    answer = answer.strip()
    return answer if len(answer) <= max_chars else None


def code(answer: str | None) -> int:
    """A number for an answer, below 2**52 so that float64 tables hold it; 0: no answer. Equal answers, equal codes."""
    if answer is None:
        return 0
    return (
        int.from_bytes(hashlib.blake2b(answer.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little") >> 12
        or 1
    )


def _last_tag(text: str) -> str | None:
    end = text.rfind(_CLOSE)
    start = text.rfind(_OPEN, 0, end) if end >= 0 else -1
    return text[start + len(_OPEN) : end] if start >= 0 else None


def _only_box(text: str) -> str | None:
    if text.count(_BOXED) != 1:
        return None
    start = text.index(_BOXED) + len(_BOXED)
    depth, i = 1, start
    while i < len(text):
        if text[i] == "\\":
            i += 1  # \{ and \} print a brace
        elif text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if depth == 0:
                return text[start:i]
        i += 1
    return None
