"""Whether a tokenizer can write the data down: one without an unknown token loses characters and says nothing."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

from megatron_brorl.data.tokenizers import Tokenizer
from megatron_brorl.errors import UserError

SAMPLED = 512  # rows of a data set, evenly spaced, that are looked at; of generated ones, which take longer:
GENERATED = 64
MOST_CHANGED = 0.5  # share of the rows that may come back changed; with more there is no run


class Written(NamedTuple):
    """A row as its author wrote it, without a template."""

    where: str
    prompt: str
    answer: str | None
    target: str | None = None


def sampled(size: int) -> list[int]:
    """At most SAMPLED evenly spaced places in a data set; the same ones every time."""
    count = min(size, SAMPLED)
    return [i * size // count for i in range(count)]


def check_round_trip(rows: Sequence[Written], tokenizer: Tokenizer, key: str) -> list[str]:
    """One line on the rows whose prompt or answer is not what the tokenizer makes of it and back; none where all are.

    White space in a row and compatible forms of a character (Unicode's NFKC) count as the same: tokenizers are trained
    to unite them. Raises UserError where more than MOST_CHANGED of the rows come back changed.
    """
    changed, example = 0, ""
    for row in rows:
        difference = next((found for text in row[1:] if text and (found := _difference(text, tokenizer))), "")
        changed += bool(difference)
        example = example or (difference and f"{row.where}: {difference}")
    if not changed:
        return []
    share = changed / len(rows)
    told = f"{key}: {changed} of {len(rows)} rows looked at ({share:.1%}) do not survive the tokenizer: {example}"
    if share > MOST_CHANGED:
        raise UserError(f"{told}; more than {MOST_CHANGED:.0%}: use a tokenizer that covers the data")
    return [f"warning: {told}"]


def _difference(text: str, tokenizer: Tokenizer) -> str:
    """How the text comes back, around the first change; "" where it is the same."""
    before, after = _plain(text), _plain(tokenizer.decode(tokenizer.encode(text)))
    if before == after:
        return ""
    at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    part = slice(max(0, at - 20), at + 20)
    return f"{before[part]!r} comes back as {after[part]!r}"


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).split())
