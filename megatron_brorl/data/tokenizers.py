"""Load tokenizers of Hugging Face and sentencepiece, and find the tokens that end a response."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from megatron_brorl.data.chat import DATE, Message, check_variables, date_variables, mentions, plain_text
from megatron_brorl.data.sentencepiece import (
    CONVERTED,
    MAX_CHECKED_PIECES,
    MODEL,
    SentencePieceTokenizer,
    check_texts,
    is_exported,
)
from megatron_brorl.errors import UserError, shown
from megatron_brorl.families.shape import CONFIG, refuse_gguf
from megatron_brorl.files import read_object
from megatron_brorl.types import Demonstration

GENERATION = "generation_config.json"
_MARK = "\u2039message {}\u203a"  # stands for a message while the template's own text is extracted
_TURN = "\u2039turn\u203a"  # stands for a turn of the assistant


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

    def template_reads(self, variable: str) -> bool:
        """Return whether the chat template mentions a variable."""

    def apply_chat(
        self, messages: Sequence[Message], variables: Mapping[str, Any] = MappingProxyType({})
    ) -> tuple[str, list[int]]:
        """Apply the chat template to messages, up to the assistant's turn. Return text and ids.

        The contents of messages are data, as above. Raises UserError if there is no template, or if it does not
        accept these messages or variables, such as enable_thinking.
        """

    def continuation(
        self, messages: Sequence[Message], chat: bool, variables: Mapping[str, Any] = MappingProxyType({})
    ) -> list[int]:
        """Return the ids that follow an assistant's turn, after its stop token, if these messages answer it.

        With chat, they are those that the template writes after a turn, up to the next turn of the assistant. They do
        not depend on earlier messages, so the rest of a rollout stays as it was sampled, even if the template drops
        thoughts of earlier turns. Without chat, they are those of chat.plain_text. The contents are data, as above.
        Raises UserError if the template does not accept the messages, or changes the end of a turn before them.
        """

    def apply_chat_turns(
        self, prompt: Sequence[Message], turns: Sequence[Message], variables: Mapping[str, Any] = MappingProxyType({})
    ) -> Demonstration:
        """Return the tokens that the chat template adds to a prompt for turns of the assistant and tool results.

        The prompt ends with the beginning of the assistant's turn, see apply_chat. A turn, which is trained on, ends
        with its stop token. Raises UserError as apply_chat does, and if the template rewrites earlier messages.
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

    The tokenizer.json that an export wrote is not read, because sentencepiece starts sooner. today: the date that
    chat templates write, by default that of this call. Raises UserError if there is no tokenizer, if a file is broken
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
        """Raise UserError if transformers cannot load the files, or if there is no end-of-sequence token.

        today: the date that chat templates write, by default that of this call.
        """
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

        self.vocab_size = len(self._inner)  # Its own vocab_size leaves out added tokens.
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

        self._special = [t.content for t in self._inner.added_tokens_decoder.values() if t.special]
        self._turn_end: tuple[Mapping[str, Any], str, int] | None = None  # variables, and _find_turn_end of them
        # Tokenizing a text shows whether the tokenizer adds BOS.
        self._leads_with_bos = self.bos_id is not None and self._inner("a").input_ids[:1] == [self.bos_id]

    def encode(self, text: str) -> list[int]:
        return self._ids(text, split_special_tokens=True)

    def encode_prompt(self, text: str, before: str = "", after: str = "") -> list[int]:
        # Encode in one piece, as in the training of the model, unless the text has special tokens.
        if self._has_special(text):
            ids = [*self._ids(before), *self.encode(text), *self._ids(after)]
        else:
            ids = self._ids(before + text + after)
        if self._leads_with_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    @property
    def template_date(self) -> datetime.date | None:
        return self._today if self._inner.chat_template and DATE in self._template() else None

    def template_reads(self, variable: str) -> bool:
        return mentions(self._template(), variable)

    def apply_chat(
        self, messages: Sequence[Message], variables: Mapping[str, Any] = MappingProxyType({})
    ) -> tuple[str, list[int]]:
        check_variables(self._template(), variables, self.directory)
        return self._framed(messages, lambda given: self._render(given, variables))

    def continuation(
        self, messages: Sequence[Message], chat: bool, variables: Mapping[str, Any] = MappingProxyType({})
    ) -> list[int]:
        if not chat:
            return self.encode(plain_text(messages))

        if self._turn_end is None or self._turn_end[0] != variables:
            self._turn_end = variables, *self._find_turn_end(variables)
        _, end, stop = self._turn_end

        def rest(given: Sequence[Message]) -> str:
            text = self._after_turn(given, variables)
            if not text.startswith(end):
                raise UserError(
                    f"{self.directory}: the chat template writes another end of a turn when messages follow; use a "
                    "template without this difference, or remove environment.factory"
                )
            return text[stop:]

        return self._framed(messages, rest)[1]

    def _find_turn_end(self, variables: Mapping[str, Any]) -> tuple[str, int]:
        """Return the text that the template writes after a turn, and the place in it after the stop token."""
        end = self._after_turn([], variables, to_answer=False)
        stops = filter(None, (self.decode_all([i]) for i in stop_ids(self.directory, self)))
        found = re.search("|".join(map(re.escape, stops)), end)
        if not found:
            raise UserError(
                f"{self.directory}: the chat template does not end a turn with a stop token of the model; correct the "
                "template or eos_token_id, or remove environment.factory"
            )
        return end, found.end()

    def _after_turn(self, messages: Sequence[Message], variables: Mapping[str, Any], to_answer: bool = True) -> str:
        """Return the text after an assistant's turn with these messages after it.

        The text before it may depend on them, because some templates write only the thoughts of the last turn.
        """
        turn = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _TURN}]
        return self._render([*turn, *messages], variables, to_answer).partition(_TURN)[2]

    def _framed(self, messages: Sequence[Message], render: Callable[[Sequence[Message]], str]) -> tuple[str, list[int]]:
        """Return the rendered text of messages and its ids. Contents of messages never become special tokens."""
        # Without special tokens in the messages, the text is tokenized as a whole, as in the training of the model.
        rendered = render(messages)
        contents = [message["content"] for message in messages]
        if not any(map(self._has_special, contents)):
            return rendered, self._ids(rendered)

        # Otherwise render it again with a mark in place of each message. The text between marks is the template's own.
        marks = [_MARK.format(i) for i in range(len(contents))]
        marked = render([{**m, "content": mark} for m, mark in zip(messages, marks, strict=True)])
        pattern = "|".join(map(re.escape, marks))
        frames = re.split(pattern, marked)
        if re.findall(pattern, marked) != marks:
            raise UserError(
                f"{self.directory}: a prompt contains a special token of the tokenizer, and its chat template does not "
                "keep messages apart; remove the special token from the data"
            )

        # Only the template's own text may become special tokens. Messages are tokenized as plain text.
        text = frames[0]
        ids = self._ids(text)
        for content, frame in zip(contents, frames[1:], strict=True):
            text += content + frame
            ids += [*self.encode(content), *self._ids(frame)]
        return text, ids

    def apply_chat_turns(
        self, prompt: Sequence[Message], turns: Sequence[Message], variables: Mapping[str, Any] = MappingProxyType({})
    ) -> Demonstration:
        messages = [*prompt, *turns]
        if self._has_special(json.dumps(messages, ensure_ascii=False)):
            raise UserError(
                "a message contains a special token of the tokenizer, which would become a control token; remove it"
            )
        whole = self._render(messages, variables, to_answer=False)
        starts = []
        for i, message in enumerate(messages):
            if i >= len(prompt) and message["role"] == "assistant":
                before = self._render(messages[:i], variables)
                if not whole.startswith(before):
                    raise UserError(
                        f"{self.directory}: the chat template changes earlier text when a turn of the assistant is "
                        "added, so its turns cannot be found; change data.chat_template_kwargs or the template"
                    )
                starts.append(len(before))

        # Encode each turn with the text up to the next one. Only the tokens up to the stop token are the model's.
        stops = stop_ids(self.directory, self)
        ids: list[int] = []
        trained: list[bool] = []
        for start, end in zip(starts, [*starts[1:], len(whole)], strict=True):
            own = self._ids(whole[start:end])
            length = next((i for i, token in enumerate(own, start=1) if token in stops), 0)
            if not length:
                raise UserError(
                    f"{self.directory}: the chat template ends a turn of the assistant without a stop token; add its "
                    f"last token to eos_token_id of {GENERATION}"
                )
            ids += own
            trained += [True] * length + [False] * (len(own) - length)
        last = len(trained) - trained[::-1].index(True)
        return Demonstration(tuple(ids[:last]), tuple(trained[:last]))

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_all([i for i in ids if int(i) not in (self.bos_id, self.eos_id, self.pad_id)])

    def decode_all(self, ids: Sequence[int]) -> str:
        known = [int(i) for i in ids]
        return str(self._inner.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def vocabulary(self) -> dict[str, tuple[int, bool]]:
        return {token: (i, token in self._special) for token, i in self._inner.get_vocab().items()}

    def _template(self) -> str:
        try:
            return str(self._inner.get_chat_template())
        except ValueError:  # there is none, or there are several and no default
            raise UserError(
                f"{self.directory}/tokenizer_config.json: data.chat = true, but the tokenizer has no chat_template; "
                "set data.chat = false or use an instruction-tuned model"
            ) from None

    def _render(self, messages: Sequence[Message], variables: Mapping[str, Any], to_answer: bool = True) -> str:
        given = {**variables}
        if self.template_date is not None:
            given |= date_variables(self._template(), self.template_date)
        try:
            rendered = self._inner.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=to_answer, **given
            )
            return str(rendered)
        except Exception as e:  # The template may raise anything.
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(
                f"{self.directory}: the chat template refuses messages of the roles {roles}: {shown(e)}; change the "
                "row, data.system_prompt or environment.factory"
            ) from None

    def _has_special(self, text: str) -> bool:
        return any(token in text for token in self._special)

    def _ids(self, text: str, split_special_tokens: bool = False) -> list[int]:
        options = {"add_special_tokens": False, "split_special_tokens": split_special_tokens, "verbose": False}
        return list(self._inner(text, **options).input_ids)


def tokenizer_difference(one: Tokenizer, other: Tokenizer) -> str:
    """Return a difference of two tokenizers in words, or "" if they give equal ids to all texts that are checked.

    Chat templates and the choice of the EOS and padding tokens are not compared.
    """
    first, second = one.vocabulary(), other.vocabulary()
    for token in sorted({*first, *second}):
        if first.get(token) != second.get(token):
            return f"{token!r} is {_described(first.get(token))} here and {_described(second.get(token))} there"
    ids = sorted(i for i, _ in first.values())
    checked = ids[:: -(-len(ids) // MAX_CHECKED_PIECES)]
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

    A generation_config.json without the key, or with null, hides the one of config.json.
    """
    path = next((directory / name for name in (GENERATION, CONFIG) if (directory / name).is_file()), None)
    given = read_object(path).get("eos_token_id") if path else None
    listed = given if isinstance(given, list) else [] if given is None else [given]
    if any(type(token) is not int or token < 0 for token in listed):
        raise UserError(f"{path}: eos_token_id = {shown(given)}: must be a token's id, or a list of them")
    return frozenset(listed)
