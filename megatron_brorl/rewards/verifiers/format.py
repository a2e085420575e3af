"""The verifier "format": a response has its parts in tags, in order, and nothing beside them.

The tags are think and answer, or those of metadata.format_tags: <think>...</think> <answer>...</answer>. What they hold
is not looked at, but must not be empty. The answer that is judged is the skeleton of the response, its tags with a dot
for text between them, so that responses of one form are judged once. Both are linear in the text.

A response continues its prompt. Where the prompt ends with one of the tags, as it does with a chat template that opens
<think>, the response must have the rest of the form: what follows that tag.
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
    """Return 1 if the skeleton has the row's tags, each once and in order, text in each and none outside.

    Tags that the prompt ends with are taken as written.
    """
    tags = row["metadata"].get("format_tags", DEFAULT_TAGS)
    forms = expected_forms(row["prompt"], tags)

    # Other tags are text: <b> in a thought, or x <y> z in a formula.
    names = {*tags, *re.findall("</(.+?)>", forms[-1])}
    known = {f"<{slash}{name}>" for name in names for slash in ("", "/")}
    plain = _TAG.sub(lambda tag: tag[0] if tag[0] in known else ".", answer)
    plain = re.sub(r"\.+", ".", plain)
    return Score(1.0) if plain in forms else Score(0.0, f"the tags are {plain[:80]}, not {forms[0]}")


def expected_forms(prompt: str, tags: Sequence[str]) -> list[str]:
    """Return the skeletons that a response to the prompt may have. The first is the one that reasons refer to."""
    whole = "".join(f"<{tag}>.</{tag}>" for tag in tags)
    tags_of_prompt = _TAG.findall(prompt)
    if not tags_of_prompt:
        return [whole]
    tag = tags_of_prompt[-1]
    after = prompt.rpartition(tag)[2].strip()
    rest = whole.partition(tag)[2]
    opened = not tag.startswith("</")

    # The prompt ends with a tag of the form. After the last closing tag nothing is left: there the prompt only shows
    # the form.
    if rest and not after:
        return [rest]
    # It opens another tag, such as a thought where the row only names the answer. Frames of chats look like that too.
    if tag not in whole and opened and not after:
        return [whole, f".</{tag[1:]}{whole}"]
    # Text after an open tag either begins its content ("<think>\nOkay,") or follows an instruction that mentions the
    # tag. Both forms count, unless the frame of a chat follows, which closes the message.
    if rest and opened and "<" not in after:
        return [whole, rest, rest.removeprefix(".")]
    return [whole]


def check_row(row: VerifierRow, where: str) -> None:
    """Raise UserError unless the row's tags, where it has any, are different names."""
    tags = row["metadata"].get("format_tags", DEFAULT_TAGS)
    named = isinstance(tags, (list, tuple)) and all(isinstance(t, str) and re.fullmatch(_NAME, t) for t in tags)
    if not named or not tags or len(set(tags)) < len(tags):
        raise UserError(
            f"{where}: metadata.format_tags = {str(tags)[:60]}: must be a list of different names of tags, "
            'such as ["think", "answer"]'
        )
