"""Hugging Face tokenizers, read from a local directory by transformers."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import AutoTokenizer

from megatron_brorl.data.chat import Message
from megatron_brorl.data.chat_template import DATE, check_template, dated, default_template
from megatron_brorl.errors import UserError

_MARK = "\u2039message {}\u203a"  # stands for a message while its chat template is taken apart


class HuggingFaceTokenizer:
    """A tokenizer.json, and the files next to it that transformers reads."""

    def __init__(self, directory: Path, today: datetime.date | None = None) -> None:
        """today: the date that chat templates write; None: the date of this call.

        Raises UserError where transformers cannot load it, or there is no end-of-sequence token.
        """
        self.directory = directory
        # Read once: a clock that passes midnight must not change the prompts of a run.
        self._today = today or datetime.date.today()

        # Only files of this directory are read; nothing is fetched, and no code of the directory's is run.
        try:
            self._inner: Any = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
        except Exception as e:  # a broken tokenizer.json arrives as almost anything, even a bare Exception
            reason = " ".join(str(e).split()) or type(e).__name__
            raise UserError(
                f"{directory}/tokenizer.json: transformers cannot load it: {reason}; copy the tokenizer files again"
            ) from None

        self._checked: set[str] = set()  # variables, as JSON, with which the chat template was tried

        # Special tokens: EOS ends responses and must be there, the others may be missing.
        self.vocab_size = len(self._inner)  # with added tokens, which its own vocab_size leaves out
        eos_id = self._inner.eos_token_id
        if eos_id is None:
            raise UserError(
                f"{directory}/tokenizer_config.json: the tokenizer has no end-of-sequence token, so no response could "
                'end; set "eos_token" to the token the model was trained to end with'
            )
        self.eos_id = int(eos_id)
        self.bos_id: int | None = self._inner.bos_token_id
        self.pad_id: int | None = self._inner.pad_token_id
        unk_id = self._inner.unk_token_id  # GPT-2 calls its EOS that too, though it can write everything
        self.unk_id: int | None = None if unk_id in (self.eos_id, self.bos_id, self.pad_id) else unk_id

        # Whether prompts begin with BOS is seen from what the tokenizer does with a text by itself.
        self._special = [t.content for t in self._inner.added_tokens_decoder.values() if t.special]
        plain = self._ids("a")  # without special tokens
        led = self._inner("a").input_ids  # with those that it adds unasked
        self._leads_with_bos = self.bos_id is not None and led[:1] == [self.bos_id] and plain[:1] != [self.bos_id]

    def encode(self, text: str) -> list[int]:
        return self._ids(text, split_special_tokens=True)

    def encode_prompt(self, text: str, before: str = "", after: str = "") -> list[int]:
        ids = self._framed(before, text, after)
        if self._leads_with_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    @property
    def template_date(self) -> datetime.date | None:
        template = self._inner.chat_template
        return self._today if template and DATE in default_template(template, self.directory) else None

    def apply_chat(
        self, messages: Sequence[Message], variables: Mapping[str, Any] = MappingProxyType({})
    ) -> tuple[str, list[int]]:
        if not self._inner.chat_template:
            raise UserError(
                f"{self.directory}/tokenizer_config.json: data.chat = true, but the tokenizer has no chat_template; "
                "set data.chat = false or use an instruction-tuned model"
            )
        # The template is a program of the directory's author, which may not end. Variables decide which branches it
        # takes, so that it is tried once for each set of them.
        key = json.dumps(variables, default=dict, sort_keys=True)
        if key not in self._checked:
            template = default_template(self._inner.chat_template, self.directory)
            check_template(template, messages, variables, self.directory)
            self._checked.add(key)

        # Without special tokens in the messages, the rendered text is tokenized as a whole, as the model was trained.
        rendered = self._render(messages, variables)
        contents = [message["content"] for message in messages]
        if not any(map(self._has_special, contents)):
            return rendered, self._ids(rendered)

        # Otherwise render once more with a mark in place of each message, and cut at the marks: what is between them
        # is the template's own text.
        marks = [_MARK.format(i) for i in range(len(contents))]
        marked = self._render([{**m, "content": mark} for m, mark in zip(messages, marks, strict=True)], variables)
        frames = re.split("|".join(map(re.escape, marks)), marked)
        if re.findall("|".join(map(re.escape, marks)), marked) != marks:
            raise UserError(
                f"{self.directory}: a prompt contains a special token of the tokenizer, and its chat template does not "
                "keep messages apart; remove the special token from the data"
            )

        # Only the template's own text may become special tokens: messages are tokenized by themselves, as plain text.
        text, ids = frames[0], self._ids(frames[0])
        for content, frame in zip(contents, frames[1:], strict=True):
            text += content + frame
            ids += [*self.encode(content), *self._ids(frame)]
        return text, ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_all([i for i in ids if int(i) not in (self.bos_id, self.eos_id, self.pad_id)])

    def decode_all(self, ids: Sequence[int]) -> str:
        known = [int(i) for i in ids]
        return str(self._inner.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        given = {**variables}
        if self.template_date is not None:
            given |= dated(default_template(self._inner.chat_template, self.directory), self.template_date)
        try:
            rendered = self._inner.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **given
            )
            return str(rendered)
        except Exception as e:  # jinja2's, of the template's own making or of its mistakes
            reason = " ".join(str(e).split()) or type(e).__name__
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(
                f"{self.directory}: the chat template refuses messages of the roles {roles}: {reason}; change the "
                "row, or data.system_prompt"
            ) from None

    def _framed(self, before: str, text: str, after: str) -> list[int]:
        """In one piece, as the model was trained to see it, unless the text would turn into special tokens."""
        if self._has_special(text):
            return [*self._ids(before), *self.encode(text), *self._ids(after)]
        return self._ids(before + text + after)

    def _has_special(self, text: str) -> bool:
        return any(token in text for token in self._special)

    def _ids(self, text: str, split_special_tokens: bool = False) -> list[int]:
        encoded = self._inner(
            text, add_special_tokens=False, split_special_tokens=split_special_tokens, verbose=False
        ).input_ids
        return [int(i) for i in encoded]
