"""The verifier "format": a response has its parts in tags, in order, and nothing beside them.

The tags are think and answer, or those of metadata.format_tags: <think>...</think> <answer>...</answer>. What they hold
is not looked at, but must not be empty. The answer that is judged is the skeleton of the response, its tags with a dot
for text between them, so that responses of one form are judged once. Both are linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.verifier import Score, VerifierRow

DEFAULT_TAGS = ("think", "answer")
_NAME = r"[A-Za-z][A-Za-z0-9_-]{0,31}"
_TAG = re.compile(f"</?{_NAME}>")


def skeleton(text: str) -> str:
    """The tags of a text, with one dot for other text between them: "<think>.</think><answer>.</answer>"."""
    parts, end = [], 0
    for tag in _TAG.finditer(text):
        parts += ["." if text[end : tag.start()].strip() else "", tag[0]]
        end = tag.end()
    return "".join([*parts, "." if text[end:].strip() else ""])


def format_(answer: str, row: VerifierRow) -> Score:
    """1 if the skeleton has the row's tags, each once and in order, text in each and none outside."""
    tags = row["metadata"].get("format_tags", DEFAULT_TAGS)

    # Other tags are text: <b> in a thought, or x <y> z in a formula.
    known = {f"<{slash}{tag}>" for tag in tags for slash in ("", "/")}
    plain = _TAG.sub(lambda tag: tag[0] if tag[0] in known else ".", answer)
    plain = re.sub(r"\.+", ".", plain)

    wanted = "".join(f"<{tag}>.</{tag}>" for tag in tags)
    return Score(1.0) if plain == wanted else Score(0.0, _why(plain, tags))


def check_row(row: VerifierRow, where: str) -> None:
    """Raise UserError unless the row's tags, where it has any, are different names."""
    tags = row["metadata"].get("format_tags", DEFAULT_TAGS)
    named = isinstance(tags, (list, tuple)) and all(isinstance(t, str) and re.fullmatch(_NAME, t) for t in tags)
    if not named or not tags or len(set(tags)) < len(tags):
        raise UserError(
            f"{where}: metadata.format_tags = {str(tags)[:60]}: must be a list of different names of tags, "
            'such as ["think", "answer"]'
        )


def _why(plain: str, tags: Sequence[str]) -> str:
    """What is wrong, for a person: the first tag that is not there once, or what is left to be wrong."""
    for tag in tags:
        for found in (f"<{tag}>", f"</{tag}>"):
            count = plain.count(found)
            if count != 1:
                return f"{found} occurs {count} times, not once"
    return "tags out of order, empty, or text outside them"
