"""Load tokenizers of Hugging Face and sentencepiece, and find the tokens that end a response."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from megatron_brorl.data.chat import DATE, NONE, Message, Variables, date_variables, plain_ids
from megatron_brorl.data.sentencepiece import (
    CONVERTED,
    MAX_CHECKED_PIECES,
    MODEL,
    SentencePieceTokenizer,
    check_texts,
    is_exported,
)
from megatron_brorl.environments.calls import find_calls
from megatron_brorl.environments.interface import Format
from megatron_brorl.errors import UserError, shown
from megatron_brorl.families.shape import CONFIG, refuse_gguf
from megatron_brorl.files import read_object

GENERATION = "generation_config.json"
_MARKS = 0x108000  # in data, the private character _MARKS + i replaces the tokenizer's special token i
_TURN = "\u2039turn\u203a"  # stands for a turn of the assistant
_CALL = {"name": "look", "arguments": {"word": 'two "words"\n\tand </a>'}}  # shows how a template writes calls


class Tokenizer(Protocol):
    """The interface of tokenizers.

    The text of a prompt is data: "</s>" in it is four characters, never the end of the sequence. Only a template
    around it, which the user or the author of the model wrote, may contain special tokens.
    """

    directory: Path  # the model directory
    vocab_size: int  # the vocabulary of the model may be larger, because of padding
    eos_id: int  # the token that ends a response
    bos_id: int | None  # the token that begins a sequence
    pad_id: int | None
    unk_id: int | None  # the token for text that cannot be encoded; None if all text can

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text. No special token is added or recognized."""

    def encode_prompt(self, text: str, before: str = "", after: str = "") -> list[int]:
        """Return the ids of before + text + after, after the BOS token if the model's own tokenizer adds it.

        Special tokens are recognized in before and after, not in text.
        """

    @property
    def template_date(self) -> datetime.date | None:
        """The date that the chat template writes into prompts, or None."""

    def template_reads(self, variable: str, tools: Any = None) -> bool:
        """Return whether the chat template mentions a variable. tools: the tools of the prompt."""

    def call_format(self, variables: Variables = NONE) -> Format:
        """Return the format in which the chat template writes tool calls, "hermes" if it writes none.

        Raises UserError if environments cannot read such a call.
        """

    def apply_chat(self, messages: Sequence[Message], variables: Variables = NONE) -> tuple[str, list[int]]:
        """Apply the chat template to messages, up to the assistant's turn. Return text and ids.

        No special tokens are recognized in the contents of messages. Raises UserError if there is no template, or if it
        does not accept these messages or variables, such as enable_thinking.
        """

    def continuation(
        self, messages: Sequence[Message], chat: bool, variables: Variables = NONE, after_stop: bool = True
    ) -> list[int]:
        """Return the ids of one turn of the assistant after its beginning, or of messages that answer a turn.

        The ids of an answer follow the stop token of the turn, up to the beginning of the next turn. They include this
        token if after_stop is false, because the turn has ended with a stop string of the user. With chat, the template
        renders the messages after a short conversation, so the rest of a rollout stays as it was sampled. Without chat,
        see chat.plain_ids. Raises UserError if the template does not write such turns.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a response without BOS, EOS and padding.

        Other special tokens such as <think> or </answer> are part of the text that verifiers read. Ids beyond the
        vocabulary, which a model with a padded vocabulary may sample, add no text.
        """

    def decode_all(self, ids: Sequence[int]) -> str:
        """Return the text with BOS, EOS and padding. Stop strings are searched in it."""

    def vocabulary(self) -> Mapping[str, tuple[int, bool]]:
        """Return the id of every token, added tokens included, and whether the token is special."""


def load_tokenizer(directory: Path, today: datetime.date | None = None) -> Tokenizer:
    """Load tokenizer.json (Hugging Face) of a model directory, or else tokenizer.model (sentencepiece).

    The tokenizer.json that an export wrote is not read, because sentencepiece loads faster. today: the date that
    chat templates write, by default today. Raises UserError if there is no tokenizer, if a file is broken
    or if there is no end-of-sequence token.
    """
    has_model = (directory / MODEL).is_file()
    if (directory / CONVERTED).is_file() and not (has_model and is_exported(directory)):
        return HuggingFaceTokenizer(directory, today)
    if has_model:
        return SentencePieceTokenizer(directory)
    refuse_gguf(directory)
    raise UserError(
        f"{directory}: no tokenizer.json and no tokenizer.model there; copy the tokenizer files of the model into it"
    )


class HuggingFaceTokenizer:
    """A tokenizer.json and its settings, read by transformers."""

    def __init__(self, directory: Path, today: datetime.date | None = None) -> None:
        from transformers import AutoTokenizer  # Importing transformers takes seconds.

        self.directory = directory
        # The prompts of a run must not change at midnight.
        self._today = today or datetime.date.today()

        # Nothing is downloaded, and no code of the directory is run.
        try:
            self._inner: Any = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
        except Exception as e:  # A broken tokenizer.json may raise a bare Exception.
            raise UserError(
                f"{directory}/tokenizer.json: transformers cannot load it: {shown(e)}; copy the tokenizer files again"
            ) from None

        self.vocab_size = len(self._inner)  # The vocab_size of transformers leaves out added tokens.
        eos_id = self._inner.eos_token_id
        if eos_id is None:
            raise UserError(
                f"{directory}/tokenizer_config.json: the tokenizer has no end-of-sequence token, so no response could "
                'end; set "eos_token" to the token the model was trained to end with'
            )
        self.eos_id = int(eos_id)
        self.bos_id: int | None = self._inner.bos_token_id
        self.pad_id: int | None = self._inner.pad_token_id
        unk_id = self._inner.unk_token_id  # GPT-2's EOS has this name too, although it can encode all text.
        self.unk_id: int | None = None if unk_id in (self.eos_id, self.bos_id, self.pad_id) else unk_id

        special = [t.content for t in self._inner.added_tokens_decoder.values() if t.special]
        self._special = sorted(special, key=len, reverse=True)  # The longer of two tokens may contain the shorter one.
        # Tokenizing a text shows whether the tokenizer adds BOS.
        self._leads_with_bos = self.bos_id is not None and self._inner("a").input_ids[:1] == [self.bos_id]

    def encode(self, text: str) -> list[int]:
        return self._ids(text, split_special_tokens=True)

    def check_file(self, text: str, where: str) -> None:
        """Raise UserError if tokenizer.json gives other ids to a text than the tokenizer that transformers loads.

        transformers 5 replaces the pre-tokenizer of tokenizer.json for some values of model_type.
        """
        text = text.strip()  # transformers changes the treatment of a first space, also of Llama's tokenizer
        ids, file_ids = self.encode(text), self._file.encode(text, add_special_tokens=False).ids
        if ids != file_ids:
            raise UserError(
                f"{self.directory / CONVERTED}: transformers reads it as {type(self._inner).__name__}, which makes "
                f"{len(ids)} tokens of the text of {where}, where the file makes {len(file_ids)}: if the model was "
                "trained with the former, write the file again by AutoTokenizer.from_pretrained(DIR).save_pretrained"
                "(DIR); otherwise use a model whose tokenizer transformers reads as it is"
            )

    @cached_property
    def _file(self) -> Any:
        from tokenizers import Tokenizer as File

        file = File.from_file(str(self.directory / CONVERTED))
        file.no_truncation()
        file.no_padding()
        file.encode_special_tokens = True  # as in `encode`
        return file

    def encode_prompt(self, text: str, before: str = "", after: str = "") -> list[int]:
        # Encode in one piece, as in the training of the model, unless the text has special tokens.
        if any(token in text for token in self._special):
            ids = [*self._ids(before), *self.encode(text), *self._ids(after)]
        else:
            ids = self._ids(before + text + after)
        if self._leads_with_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    @property
    def template_date(self) -> datetime.date | None:
        return self._today if DATE in str(self._inner.chat_template) else None  # There may be several templates.

    def template_reads(self, variable: str, tools: Any = None) -> bool:
        return re.search(rf"\b{re.escape(variable)}\b", self._template(tools)) is not None

    def call_format(self, variables: Variables = NONE) -> Format:
        if not self.template_reads("tool_calls", variables.get("tools")):
            return "hermes"
        question = {"role": "user", "content": "x"}
        plain, calling = (
            self._render([question, {"role": "assistant", **turn}], variables, to_answer=False)
            for turn in ({"content": _TURN}, {"content": "", "tool_calls": [{"type": "function", "function": _CALL}]})
        )
        text = calling.removeprefix(plain.partition(_TURN)[0])
        text = text[: end.start()] if (end := self._stop.search(text)) else text
        formats: tuple[Format, ...] = ("hermes", "json")
        for name in formats:
            if [{"name": call.name, "arguments": call.arguments} for call in find_calls(text, name)] == [_CALL]:
                return name
        raise UserError(
            f"{self.directory}: the chat template writes a tool call as {shown(text.strip(), 200)}, which environments "
            "cannot read; use a template with a format of docs/environments.md"
        )

    def apply_chat(self, messages: Sequence[Message], variables: Variables = NONE) -> tuple[str, list[int]]:
        for name in variables:
            if not self.template_reads(name, variables.get("tools")):
                raise UserError(
                    f"data.chat_template_kwargs.{name}: the chat template of {self.directory} reads no such variable; "
                    "correct or remove the name"
                )
        return self._encoded(messages, lambda replaced: self._render(replaced, variables))

    def continuation(
        self, messages: Sequence[Message], chat: bool, variables: Variables = NONE, after_stop: bool = True
    ) -> list[int]:
        if not chat:
            return plain_ids(messages, self.encode, self.eos_id)

        def added(turns: Sequence[Message]) -> str:
            question = {"role": "user", "content": "x"}
            if messages[0]["role"] == "assistant":
                before = self._render([question], variables)
                text = self._render([question, *turns], variables, to_answer=False)
                end = self._stop.search(text, len(before))
                tools = variables.get("tools")
                writes_calls = "tool_calls" not in messages[0] or self.template_reads("tool_calls", tools)
                if text.startswith(before) and end and writes_calls:
                    return text[len(before) : end.end()]
            else:  # Some templates write thoughts only into the last turn, so the text before its content may change.
                turn = {"role": "assistant", "content": _TURN}
                text = self._render([question, turn, *turns], variables).partition(_TURN)[2]
                if end := self._stop.match(text):
                    return text[end.end() if after_stop else 0 :]
            raise UserError(
                f"{self.directory}: the chat template does not write a turn of the assistant as it asks for one, with "
                "its tool calls and a stop token at the end; change the template, its variables or eos_token_id"
            )

        return self._encoded(messages, added)[1]

    @cached_property
    def _stop(self) -> re.Pattern[str]:
        stops = (self.decode_all([i]) for i in stop_ids(self.directory, self))
        return re.compile(rf"\s*(?:{'|'.join(map(re.escape, filter(None, stops)))})")

    def _encoded(self, messages: Sequence[Message], render: Callable[[Any], str]) -> tuple[str, list[int]]:
        """Return the rendered text of messages and its ids. Special tokens in messages stay plain text."""
        # A private character replaces each special token in messages. Those that are left are the template's own.
        marks = {token: chr(_MARKS + i) for i, token in enumerate(self._special)}
        replaced = _replaced(list(messages), marks)
        rendered = render(replaced)
        # If messages have no special token, the text is tokenized as a whole, as in the training of the model.
        if replaced == list(messages):
            return rendered, self._ids(rendered)
        tokens = {ord(mark): token for token, mark in marks.items()}
        ids = []
        # The parts at odd indices are special tokens, which may include the white space around them.
        for i, part in enumerate(re.split(rf"(\s*(?:{'|'.join(map(re.escape, self._special))})\s*)", rendered)):
            ids += self._ids(part.translate(tokens), split_special_tokens=i % 2 == 0)
        return rendered.translate(tokens), ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_all([i for i in ids if int(i) not in (self.bos_id, self.eos_id, self.pad_id)])

    def decode_all(self, ids: Sequence[int]) -> str:
        token_ids = [int(i) for i in ids]
        return str(self._inner.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def vocabulary(self) -> dict[str, tuple[int, bool]]:
        return {token: (i, token in self._special) for token, i in self._inner.get_vocab().items()}

    def _template(self, tools: Any) -> str:
        try:
            return str(self._inner.get_chat_template(tools=tools))  # "tool_use" with tools, if there are several
        except ValueError:  # there is none, or there are several and no default
            raise UserError(
                f"{self.directory}/tokenizer_config.json: data.chat = true, but the tokenizer has no chat_template; "
                "set data.chat = false or use an instruction-tuned model"
            ) from None

    def _render(self, messages: Sequence[Message], variables: Variables, to_answer: bool = True) -> str:
        arguments = {**variables}
        template = self._template(variables.get("tools"))
        if self.template_date is not None:
            arguments |= date_variables(template, self.template_date)
        try:
            rendered = self._inner.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=to_answer, **arguments
            )
            return str(rendered)
        except Exception as e:  # The template may raise anything.
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(
                f"{self.directory}: the chat template refuses messages of the roles {roles}: {shown(e)}; change the "
                "row, data.system_prompt or environment.factory"
            ) from None

    def _ids(self, text: str, split_special_tokens: bool = False) -> list[int]:
        options = {"add_special_tokens": False, "split_special_tokens": split_special_tokens, "verbose": False}
        return list(self._inner(text, **options).input_ids)


def _replaced(value: Any, marks: Mapping[str, str]) -> Any:
    """Return a copy of a JSON value with marks in place of tokens in all of its strings."""
    if isinstance(value, dict):
        return {_replaced(k, marks): _replaced(v, marks) for k, v in value.items()}
    if isinstance(value, list):
        return [_replaced(element, marks) for element in value]
    if isinstance(value, str):
        for token, mark in marks.items():
            value = value.replace(token, mark)
    return value


def tokenizer_difference(one: Tokenizer, other: Tokenizer) -> str:
    """Return a difference of two tokenizers in words, or "" if they give equal ids to all texts that are checked.

    Chat templates and the choice of the EOS and padding tokens are not compared.
    """
    tokens, other_tokens = one.vocabulary(), other.vocabulary()
    for token in sorted({*tokens, *other_tokens}):
        if tokens.get(token) != other_tokens.get(token):
            return f"{token!r} is {_described(tokens.get(token))} here and {_described(other_tokens.get(token))} there"
    ids = sorted(i for i, _ in tokens.values())
    checked = ids[:: -(-len(ids) // MAX_CHECKED_PIECES)]  # evenly spaced, at most MAX_CHECKED_PIECES
    for text in check_texts([one.decode_all([i]) for i in checked]):
        if one.encode(text) != other.encode(text):
            return f"they give different ids to {text[:40]!r}"
    return ""


def _described(entry: tuple[int, bool] | None) -> str:
    if entry is None:
        return "no token"
    return f"{'special ' if entry[1] else ''}token {entry[0]}"


def stop_ids(directory: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids that end a response: those at which transformers' generate() stops, and the tokenizer's EOS.

    Supervised training ends its targets with the tokenizer's EOS. Raises UserError if a file names no ids.
    """
    return tuple(sorted({tokenizer.eos_id, *transformers_stop_ids(directory)}))


def transformers_stop_ids(directory: Path) -> frozenset[int]:
    """Return eos_token_id of generation_config.json, or of config.json in a directory without that file.

    A generation_config.json without the key, or with null, hides the key of config.json.
    """
    path = next((directory / name for name in (GENERATION, CONFIG) if (directory / name).is_file()), None)
    value = read_object(path).get("eos_token_id") if path else None
    listed = value if isinstance(value, list) else ([] if value is None else [value])
    if any(type(token) is not int or token < 0 for token in listed):
        raise UserError(f"{path}: eos_token_id = {shown(value)}: must be a token's id, or a list of them")
    return frozenset(listed)
