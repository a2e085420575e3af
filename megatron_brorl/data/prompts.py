"""Rows of data files, and the prompts made of them.

A row is an object {"prompt": str, "answer": str or null, "target": str, "verifier": str, "id": str, "metadata":
object}. Only the prompt is required. The default verifier is data.verifier, and the default target, which supervised
training learns, is the answer. data.columns names the columns of other files; functions of users receive the rest.
Messages name a row by its line or number, from 1. Metadata may be a string of JSON in Parquet. A prompt may be a list
of messages; supervised training learns the assistant's messages after the last one of the user. Without a chat
template, <result>...</result> in a target is an observation, which is not learned.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from megatron_brorl.config.schema import ColumnsConfig, DataConfig, RewardConfig
from megatron_brorl.data.chat import Message, check_conversation, conversation, prompt_text
from megatron_brorl.data.columns import KEYS, map_columns
from megatron_brorl.data.readers import parse_row, raw_rows, without_nulls
from megatron_brorl.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from megatron_brorl.errors import UserError, shown
from megatron_brorl.rewards.registry import entry
from megatron_brorl.rewards.verifier import VerifierRow
from megatron_brorl.types import Demonstration, Prompt

_COMPARED = 100  # rows whose prompts are tokenized a second time, by tokenizer.json
_MAX_CHANGED = 0.5  # share of rows that a tokenizer may change
_OBSERVATION = re.compile("(<result>.*?</result>)", re.DOTALL)  # in a target without a chat template


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
    turns: Sequence[Message] = ()  # messages that supervised training learns instead of the target
    columns: Mapping[str, Any] = field(default_factory=dict)  # see Prompt

    def texts(self) -> tuple[str | None, ...]:
        """Return the texts that the tokenizer must be able to represent."""
        return prompt_text(self.prompt), self.answer, self.target, prompt_text(self.turns)


@dataclass(frozen=True)
class RowFormat:
    """The columns of a file and the verifiers of its rows. The default is a file with this project's keys."""

    verifier: str = "exact"  # for rows that name none
    reward: RewardConfig = field(default_factory=RewardConfig)
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)


def read_rows(path: Path, row_format: RowFormat = RowFormat()) -> list[Row]:
    """Return the rows of a file. Raises UserError at the first malformed row."""
    rows = raw_rows(path)
    return [check_row(raw, f"{path}:{number}", f"{path.name}:{number}", row_format) for number, raw in rows]


def tokenize(rows: Sequence[Row], tokenizer: Tokenizer, config: DataConfig, max_prompt_tokens: int) -> list[Prompt]:
    """Return the prompts of rows in their template. Raises UserError naming a row that is too long."""
    prompts = []
    if config.chat and any("tool_calls" in turn for row in rows for turn in row.turns):
        tokenizer.call_format(config.chat_template_kwargs)  # Raises UserError if environments cannot read such calls.
    for row in rows:
        text, ids = render(row.prompt, tokenizer, config, max_prompt_tokens, row.where)
        response = _demonstration(row, tokenizer, config)
        prompt = Prompt(row.id, text, ids, row.answer, row.verifier, row.metadata, row.target, response, row.columns)
        prompts.append(prompt)
    return prompts


def _demonstration(row: Row, tokenizer: Tokenizer, config: DataConfig) -> Demonstration | None:
    """Return the response of a row with several turns, with the tokens that a rollout has; None for other rows."""
    turns = row.turns if config.chat else _tagged_turns(row)
    ids: list[int] = []
    trained: list[bool] = []
    for role, messages in groupby(turns, lambda message: message["role"]):
        try:
            turn_ids = tokenizer.continuation(list(messages), config.chat, config.chat_template_kwargs)
        except UserError as e:
            raise UserError(f"{row.where}: {e}") from None
        ids += turn_ids
        trained += [role == "assistant"] * len(turn_ids)
    return Demonstration(tuple(ids), tuple(trained)) if ids else None


def _tagged_turns(row: Row) -> list[Message]:
    """Return the turns of a target with observations in tags as messages; [] without observations."""
    parts = _OBSERVATION.split(row.target or "")  # turns at even indices, observations at odd ones
    has_tags = any(tag in turn for turn in parts[::2] for tag in ("<result>", "</result>"))
    has_observations = len(parts) > 1
    if has_tags or (has_observations and not parts[-1]):
        raise UserError(
            f"{row.where}: target: <result> and </result> must surround each observation, and a turn must follow it"
        )
    roles = ("assistant", "user")
    return [{"role": roles[i % 2], "content": part} for i, part in enumerate(parts) if part and has_observations]


def render(
    prompt: str | list[Message], tokenizer: Tokenizer, config: DataConfig, max_prompt_tokens: int, where: str
) -> tuple[str, tuple[int, ...]]:
    """Return the text of a prompt in its template, and its ids. Raises UserError if it cannot be used."""
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


def check_round_trip(rows: Sequence[tuple[str, Sequence[str | None]]], tokenizer: Tokenizer, key: str) -> list[str]:
    """Return a warning if texts change when they are encoded and decoded; [] if no text does.

    rows: the place of each row, and its texts without a template. A tokenizer without an unknown token loses characters
    silently. White space and compatible forms of a character (NFKC) do not count, because tokenizers are trained to
    unite them. Raises UserError if more than half of the rows change, or if transformers and tokenizer.json differ.
    """
    changes = []
    if isinstance(tokenizer, HuggingFaceTokenizer):
        for where, texts in rows[:_COMPARED]:
            tokenizer.check_file(texts[0] or "", where)
    for where, texts in rows:
        row_changes = [change for text in texts if text and (change := _round_trip_change(text, tokenizer))]
        changes += [f"{where}: {change}" for change in row_changes[:1]]
    if not changes:
        return []
    share = len(changes) / len(rows)
    count = f"{len(changes)} of {len(rows)} checked rows ({share:.1%})"
    message = f"{key}: {count} do not survive the tokenizer: {changes[0]}"
    if share > _MAX_CHANGED:
        raise UserError(f"{message}; more than {_MAX_CHANGED:.0%}: use a tokenizer that covers the data")
    return [f"warning: {message}"]


def _round_trip_change(text: str, tokenizer: Tokenizer) -> str:
    before, after = (
        " ".join(unicodedata.normalize("NFKC", t).split()) for t in (text, tokenizer.decode(tokenizer.encode(text)))
    )
    if before == after:
        return ""
    end = min(len(before), len(after))
    changed = next((i for i in range(end) if before[i] != after[i]), end)
    shown_range = slice(max(0, changed - 20), changed + 20)
    return f"{before[shown_range]!r} comes back as {after[shown_range]!r}"


def check_row(raw: Any, where: str, default_id: str, row_format: RowFormat = RowFormat()) -> Row:
    """Return a row of raw_rows if it is valid. Raises UserError for its first mistake."""
    row = parse_row(raw, where)
    if not isinstance(row, dict):
        raise UserError(f'{where}: a row must be an object such as {{"prompt": "...", "answer": "..."}}')

    # A key with null counts as missing. Unknown keys are refused, because they are probably misspelt.
    mapped, columns = map_columns(row, row_format.columns, where)
    row = {key: value for key, value in mapped.items() if value is not None}
    task = row.pop("task", "") if row_format.columns.task else ""
    unknown = [key for key in row if key not in KEYS]
    if unknown:
        raise UserError(
            f"{where}: unknown key {unknown[0]!r}; known: {', '.join(KEYS)}; put the rest in metadata, or say in "
            "data.columns which column is the prompt"
        )

    prompt: Any = row.get("prompt")
    answer = row.get("answer")
    target = row.get("target")
    turns: list[Message] = []
    if isinstance(prompt, list):
        prompt, turns = check_conversation(prompt, where)
        if turns and target is not None:
            raise UserError(f"{where}: has a target, and a message of the assistant at the end; remove one of them")
        if turns:
            target = turns[-1]["content"]
            turns = [] if turns == [{"role": "assistant", "content": target}] else turns  # one turn: only the target
    verifier = row.get("verifier", row_format.verifier)
    row_id = row.get("id", default_id)
    text = prompt_text(prompt) if isinstance(prompt, list) else prompt
    texts = {"prompt": text, "answer": answer, "target": target, "verifier": verifier, "id": row_id, "task": task}
    _check_texts({**texts, "messages": json.dumps(turns, ensure_ascii=False)}, where)
    answer = target if answer is None else answer

    # Parquet has no type for any object, so metadata may be a string of JSON there.
    metadata = row.get("metadata", {})
    if isinstance(metadata, str) and not isinstance(raw, bytes):
        metadata = parse_row(metadata.encode("utf-8", "surrogatepass"), where)
    metadata = _checked_object({} if metadata is None else metadata, where, "metadata")
    columns = _checked_object(columns, where, "columns")
    metadata |= {"task": task} if task else {}

    verifier_row = VerifierRow(id=row_id, prompt=text, answer=answer, metadata=metadata, columns=columns)
    entry(verifier, where, row_format.reward).check_row(verifier_row, where)
    return Row(where, prompt, answer, verifier, row_id, metadata, target, tuple(turns), columns)


def first_mistake(path: Path, row_format: RowFormat) -> str:
    """Return the message about a file that cannot be read or its first row; "" if the row is valid."""
    try:
        for number, raw in islice(raw_rows(path), 1):
            check_row(raw, f"{path}:{number}", default_id="-", row_format=row_format)
    except UserError as e:
        return str(e)
    return ""


def _check_texts(texts: Mapping[str, Any], where: str) -> None:
    for key, text in texts.items():
        if text is None and key in ("answer", "target"):
            continue
        if not isinstance(text, str) or not (text.strip() or key in ("answer", "task")):
            kind = "a string" if key in ("answer", "task") else "a string that is not empty"
            actual = "there is none" if text is None else f"not {shown(text, 60)}"
            raise UserError(f"{where}: {key} must be {kind}, {actual}")
        # JSON can hold halves of surrogate pairs, which neither a tokenizer nor a verifier accepts.
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise UserError(f"{where}: {key} has half of a surrogate pair (\\ud800 to \\udfff alone); fix its escapes")


def _checked_object(value: Any, where: str, key: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where}: {key} must be an object, not {shown(value, 60)}")
    try:
        checked: dict[str, Any] = without_nulls(value)
        if key == "metadata":  # Columns that this project does not read may have any numbers.
            json.dumps(checked, allow_nan=False, default=str)
    except RecursionError:
        raise UserError(f"{where}: {key} is nested too deeply; flatten it") from None
    except ValueError:
        raise UserError(f"{where}: {key} has a NaN or infinite number; use a finite number or null") from None
    return checked


def sft_examples(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[tuple[list[int], Demonstration]]:
    """Return the prompt ids and the response of each prompt for supervised training.

    The response is the demonstration, or the target, or the reference answer. The last two end with the EOS token.
    """
    examples = []
    for prompt in prompts:
        if prompt.demonstration:
            examples.append((list(prompt.token_ids), prompt.demonstration))
            continue
        target = prompt.answer if prompt.target is None else prompt.target
        if target is None:
            raise UserError(
                f"prompt {prompt.id!r} has neither target nor reference answer, so there is nothing to learn; "
                "remove its task or row from supervised training"
            )
        ids = (*tokenizer.encode(target), tokenizer.eos_id)
        examples.append((list(prompt.token_ids), Demonstration(ids, (True,) * len(ids))))
    return examples
