r"""Which part of a response is the answer.

full        the whole text
answer_tag  what stands inside the last <answer>...</answer>
boxed       what stands inside the only \boxed{...}; several are no answer, or a policy would learn to list guesses

Verifiers choose one of these, or bring their own (verifier.Entry.find).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Literal, NamedTuple

from megatron_brorl.rewards.verifier import Find

_OPEN, _CLOSE = "<answer>", "</answer>"
_BOXED = "\\boxed{"
_MOST_CHARS = 1 << 20  # of a response that is looked at: ten times what a long context holds


def after_thought(response: str) -> str:
    """Return what follows the last </think>; the whole response where there is none."""
    return response.rpartition("</think>")[2]


class Found(NamedTuple):
    """The answer in a response, or why there is none."""

    answer: str | None
    why: str = ""


def full(text: str) -> str | None:
    """The whole text."""
    return text


def answer_tag(text: str) -> str | None:
    """What stands inside the last <answer>...</answer>."""
    end = text.rfind(_CLOSE)
    start = text.rfind(_OPEN, 0, end) if end >= 0 else -1
    return text[start + len(_OPEN) : end] if start >= 0 else None


def boxed(text: str) -> str | None:
    r"""What stands inside the only \boxed{...}."""
    if text.count(_BOXED) != 1:
        return None

    # To the brace that closes it.
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


FINDERS: Mapping[Literal["full", "answer_tag", "boxed"], Find] = {
    "full": full,
    "answer_tag": answer_tag,
    "boxed": boxed,
}


def extract(text: str, find: Find, max_chars: int) -> Found:
    """The answer without white space at its ends; none where `find` has none or it has more than `max_chars`.

    A response of more than a million characters is not looked at: no honest one comes near.
    """
    if len(text) > _MOST_CHARS:
        return Found(None, f"the response has more than {_MOST_CHARS} characters")
    answer = find(text)
    if answer is None:
        return Found(None, "no answer in the response")
    answer = answer.strip()
    if len(answer) > max_chars:
        return Found(None, f"the answer has more than {max_chars} characters")
    return Found(answer)


def code(answer: str | None) -> int:
    """A number for an answer, below 2**52 so that float64 tables hold it; 0: no answer. Equal answers, equal codes."""
    if answer is None:
        return 0
    return (
        int.from_bytes(hashlib.blake2b(answer.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little") >> 12
        or 1
    )
