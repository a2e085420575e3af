"""Verifier `format`: a response must consist of tagged parts in order, such as <think>...</think><answer>...</answer>.

metadata.format_tags replaces the tags think and answer. The parts must not be empty, and no text may be outside them.
The verifier scores the skeleton of a response, which is its tags with a dot for the text between them.

A response continues its prompt. If the prompt ends with one of the tags, as with a chat template that opens <think>,
the response must contain only the rest of the form after that tag.
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
    """Return the tags of a text with one dot for the text between them: "<think>.</think><answer>.</answer>"."""
    parts = []
    end = 0
    for tag in _TAG.finditer(text):
        parts += ["." if text[end : tag.start()].strip() else "", tag[0]]
        end = tag.end()
    return "".join([*parts, "." if text[end:].strip() else ""])


def verify(answer: str, row: VerifierRow) -> Score:
    """Return 1 if the skeleton has the row's tags once and in order, with text inside each and none outside.

    Tags at the end of the prompt count as part of the response.
    """
    tags = row["metadata"].get("format_tags", DEFAULT_TAGS)
    forms = expected_forms(row["prompt"], tags)

    # Treat other tags as text, such as <b> in a thought or x <y> z in a formula.
    names = {*tags, *re.findall("</(.+?)>", forms[-1])}
    known = {f"<{slash}{name}>" for name in names for slash in ("", "/")}
    plain = _TAG.sub(lambda tag: tag[0] if tag[0] in known else ".", answer)
    plain = re.sub(r"\.+", ".", plain)
    return Score(1.0) if plain in forms else Score(0.0, f"the tags are {plain[:80]}, not {forms[0]}")


def expected_forms(prompt: str, tags: Sequence[str]) -> list[str]:
    """Return the skeletons that a response to the prompt may have. Messages show the first one."""
    whole = "".join(f"<{tag}>.</{tag}>" for tag in tags)
    tags_of_prompt = _TAG.findall(prompt)
    if not tags_of_prompt:
        return [whole]
    tag = tags_of_prompt[-1]
    after = prompt.rpartition(tag)[2].strip()
    rest = whole.partition(tag)[2]
    opened = not tag.startswith("</")

    # The prompt ends with a tag of the form. If this is the last closing tag, the prompt only describes the form.
    if rest and not after:
        return [rest]
    # The prompt opens another tag, such as <think> where the row only has <answer>. Chat templates also end like this.
    if tag not in whole and opened and not after:
        return [whole, f".</{tag[1:]}{whole}"]
    # The text after an open tag is its content ("<think>\nOkay,") or belongs to an instruction that mentions the tag.
    # Accept both forms, unless a tag of the chat template ends the message.
    if rest and opened and "<" not in after:
        return [whole, rest, rest.removeprefix(".")]
    return [whole]


def check_row(row: VerifierRow, where: str) -> None:
    """Raise UserError unless metadata.format_tags, if given, are different names of tags."""
    tags = row["metadata"].get("format_tags", DEFAULT_TAGS)
    named = isinstance(tags, (list, tuple)) and all(isinstance(t, str) and re.fullmatch(_NAME, t) for t in tags)
    if not named or not tags or len(set(tags)) < len(tags):
        raise UserError(
            f"{where}: metadata.format_tags = {str(tags)[:60]}: must be a list of different names of tags, "
            'such as ["think", "answer"]'
        )
