"""Rows of data files, and the prompts made of them.

A row is an object {"prompt": str, "answer": str or null, "target": str, "verifier": str, "id": str, "metadata":
object}. Only the prompt is required. The default verifier is data.verifier, and the default target, which supervised
training imitates, is the answer. data.columns names the columns of other files. A row is named by its line or number,
from 1. Metadata may be a string of JSON in Parquet. A prompt may be a list of messages; if the last one is the
assistant's, it is the target.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_brorl.config.schema import ColumnsConfig, DataConfig, RewardConfig
from megatron_brorl.data.chat import Message, check_messages, conversation, split_answer, spoken
from megatron_brorl.data.columns import KEYS, mapped
from megatron_brorl.data.files import parse_row, raw_rows, without_nulls
from megatron_brorl.data.tokenizers import Tokenizer
from megatron_brorl.errors import UserError
from megatron_brorl.rewards.registry import entry
from megatron_brorl.rewards.verifier import VerifierRow
from megatron_brorl.types import Prompt

OWN_FORM = ColumnsConfig()  # files in the form above
_MAX_CHANGED = 0.5  # share of rows that a tokenizer may change
Written = tuple[str, Sequence[str | None]]  # (where, texts) of a row without a template


@dataclass(frozen=True)
class Row:
    """A valid row."""

    where: str  # file:row
    prompt: str | list[Message]
    answer: str | None
    verifier: str
    id: str
    metadata: dict[str, Any]
    target: str | None = None


@dataclass(frozen=True)
class Verifiers:
    """The verifiers of a run's rows."""

    default: str = "exact"  # of rows that name none
    reward: RewardConfig = field(default_factory=RewardConfig)


def read_rows(path: Path, verifiers: Verifiers = Verifiers(), columns: ColumnsConfig = OWN_FORM) -> list[Row]:
    """Return the rows of a file. Raises UserError at the first malformed row."""
    rows: dict[str, Row] = {}  # by id
    for number, raw in raw_rows(path):
        row = check_row(raw, f"{path}:{number}", f"{path.name}:{number}", verifiers, columns)
        if row.id in rows:
            raise UserError(f"{row.where}: id {row.id!r} is taken by {rows[row.id].where}; give every row its own id")
        rows[row.id] = row
    return list(rows.values())


def tokenize(rows: Sequence[Row], tokenizer: Tokenizer, config: DataConfig, max_prompt_tokens: int) -> list[Prompt]:
    """Return the prompts of rows in their template. Raises UserError naming the row that does not fit."""
    prompts = []
    for row in rows:
        text, ids = render(row.prompt, tokenizer, config, max_prompt_tokens, row.where)
        prompts.append(Prompt(row.id, text, ids, row.answer, row.verifier, row.metadata, row.target))
    return prompts


def render(
    prompt: str | list[Message], tokenizer: Tokenizer, config: DataConfig, max_prompt_tokens: int, where: str
) -> tuple[str, tuple[int, ...]]:
    """Return the text of a prompt in its template, and its ids. Raises UserError, as tokenize."""
    if config.chat:
        messages = conversation(prompt, config, where)
        try:
            framed, ids = tokenizer.apply_chat(messages, config.chat_template_kwargs)
        except UserError as e:
            raise UserError(f"{where}: {e}") from None
    elif isinstance(prompt, str):
        before, _, after = config.template.partition("{prompt}")
        framed, ids = before + prompt + after, tokenizer.encode_prompt(prompt, before, after)
    else:
        raise UserError(f"{where}: the prompt is a list of messages: set data.chat = true, or make it a string")

    if len(ids) > max_prompt_tokens:
        raise UserError(
            f"{where}: the prompt has {len(ids)} tokens, but at most {max_prompt_tokens} leave room for a response; "
            "shorten it, lower rollout.max_tokens or raise model.context"
        )
    if not ids:
        raise UserError(f"{where}: the prompt has no tokens; give it some text")
    if tokenizer.unk_id is not None and tokenizer.unk_id in ids:
        raise UserError(
            f"{where}: the prompt has characters that the tokenizer does not know: {framed[:80]!r}; "
            "remove them or use a tokenizer that covers them"
        )
    return framed, tuple(ids)


def check_round_trip(rows: Sequence[Written], tokenizer: Tokenizer, key: str) -> list[str]:
    """Return a warning about rows with a text that changes when it is encoded and decoded; [] if there are none.

    A tokenizer without an unknown token loses characters silently. White space and compatible forms of a character
    (NFKC) do not count, because tokenizers are trained to unite them. Raises UserError if more than half of the rows
    change.
    """
    differences = []
    for where, texts in rows:
        found = next((change for text in texts if text and (change := _round_trip_change(text, tokenizer))), "")
        differences += [f"{where}: {found}"] if found else []
    if not differences:
        return []
    share = len(differences) / len(rows)
    count = f"{len(differences)} of {len(rows)} checked rows ({share:.1%})"
    told = f"{key}: {count} do not survive the tokenizer: {differences[0]}"
    if share > _MAX_CHANGED:
        raise UserError(f"{told}; more than {_MAX_CHANGED:.0%}: use a tokenizer that covers the data")
    return [f"warning: {told}"]


def _round_trip_change(text: str, tokenizer: Tokenizer) -> str:
    before, after = (
        " ".join(unicodedata.normalize("NFKC", t).split()) for t in (text, tokenizer.decode(tokenizer.encode(text)))
    )
    if before == after:
        return ""
    at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    part = slice(max(0, at - 20), at + 20)
    return f"{before[part]!r} comes back as {after[part]!r}"


def check_row(raw: Any, where: str, default_id: str, verifiers: Verifiers, columns: ColumnsConfig = OWN_FORM) -> Row:
    """Return a row of raw_rows if it is valid. Raises UserError for its first mistake."""
    row = parse_row(raw, where)
    if not isinstance(row, dict):
        raise UserError(f'{where}: a row must be an object such as {{"prompt": "...", "answer": "..."}}')

    # A null key counts as missing. A misspelt key would too, and is refused.
    row = {key: value for key, value in mapped(row, columns, where).items() if value is not None}
    unknown = [key for key in row if key not in KEYS]
    if unknown:
        raise UserError(
            f"{where}: unknown key {unknown[0]!r}; known: {', '.join(KEYS)}; put the rest in metadata, or say in "
            "data.columns which column is the prompt"
        )

    prompt, answer, row_id, target = (row.get(key) for key in ("prompt", "answer", "id", "target"))
    if isinstance(prompt, list):
        # The assistant's last message is to be imitated, not to be answered.
        asked, said = split_answer(prompt)
        prompt = check_messages(asked, where)
        if said is not None and target is not None:
            raise UserError(f"{where}: has a target, and a message of the assistant at the end; remove one of them")
        target = target if said is None else said
    elif not isinstance(prompt, str) or not prompt.strip():
        raise UserError(f"{where}: prompt must be a string that is not empty, not {_shown(prompt)}")
    if answer is not None and not isinstance(answer, str):
        raise UserError(f"{where}: answer must be a string or null, not {_shown(answer)}; put it in quotes")
    if target is not None and not (isinstance(target, str) and target.strip()):
        raise UserError(f"{where}: target must be a string that is not empty, not {_shown(target)}")
    answer = target if answer is None else answer
    if row_id is not None and (not isinstance(row_id, str) or not row_id):
        raise UserError(f"{where}: id must be a string that is not empty, not {_shown(row_id)}")

    verifier = row.get("verifier", verifiers.default)
    if not isinstance(verifier, str):
        raise UserError(f"{where}: verifier must be a string, not {_shown(verifier)}")
    judged_by = entry(verifier, where, verifiers.reward)

    # Parquet has no type for any object, so metadata may be a string of JSON there.
    metadata = row.get("metadata", {})
    if isinstance(metadata, str) and not isinstance(raw, bytes):
        metadata = parse_row(metadata.encode("utf-8", "surrogatepass"), where)
    metadata = {} if metadata is None else without_nulls(metadata)
    if not isinstance(metadata, dict):
        raise UserError(f"{where}: metadata must be an object, not {_shown(metadata)}")

    # JSON can hold what neither a tokenizer nor a verifier accepts.
    for key, text in (("prompt", spoken(prompt)), ("answer", answer), ("target", target), ("id", row_id)):
        if text is not None and not _is_unicode(text):
            raise UserError(f"{where}: {key} has half of a surrogate pair (\\ud800 to \\udfff alone); fix its escapes")
    if not _is_finite(metadata):
        raise UserError(f"{where}: metadata has a NaN or infinite number; use a finite number or null")

    # A row without an id is named by its place, which is the same in every run.
    row_id = default_id if row_id is None else row_id
    judged_by.check_row(VerifierRow(id=row_id, prompt=spoken(prompt), answer=answer, metadata=metadata), where)
    return Row(where, prompt, answer, verifier, row_id, metadata, target)


def _is_finite(value: Any) -> bool:
    """Return whether all numbers are finite, without recursion, because metadata may be nested deeply."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list):
            left += value
        elif isinstance(value, float) and not math.isfinite(value):
            return False
    return True


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= c <= "\udfff" for c in text)


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."
