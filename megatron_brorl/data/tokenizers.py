"""Text to token ids and back, for Hugging Face directories and for sentencepiece models."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from megatron_brorl.data.chat import Message
from megatron_brorl.data.sentencepiece_tokenizer import SentencePieceTokenizer, train_sentencepiece
from megatron_brorl.errors import UserError
from megatron_brorl.model_shape import refuse_gguf

__all__ = ["Tokenizer", "load_tokenizer", "train_sentencepiece"]


class Tokenizer(Protocol):
    """What the project asks of a tokenizer.

    The text of a prompt is data: "</s>" in it is four characters, never the end of the sequence. Only what the user
    or the model's author wrote around it (a template) may contain special tokens.
    """

    @property
    def directory(self) -> Path:
        """That it was read from."""

    @property
    def vocab_size(self) -> int:
        """Tokens that it knows; the model's vocabulary may be padded beyond that."""

    @property
    def eos_id(self) -> int:
        """End of sequence: the last token of a response that ends by itself."""

    @property
    def bos_id(self) -> int | None:
        """Beginning of sequence, where there is one."""

    @property
    def pad_id(self) -> int | None:
        """Padding, where there is one."""

    @property
    def unk_id(self) -> int | None:
        """Stands for what cannot be written; None where everything can."""

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, no special token added or recognized."""

    def encode_prompt(self, text: str, before: str = "", after: str = "") -> list[int]:
        """Ids of before + text + after, led by the BOS token if the model's own tokenizer does so.

        Special tokens are recognized in before and after, not in text.
        """

    @property
    def template_date(self) -> datetime.date | None:
        """The date that the chat template writes into prompts, or None where it writes none."""

    def apply_chat(
        self, messages: Sequence[Message], variables: Mapping[str, Any] = MappingProxyType({})
    ) -> tuple[str, list[int]]:
        """Return the chat template around messages, up to where the assistant begins: as text and as ids.

        variables: of the template, such as enable_thinking. The contents of messages are data, as above. Raises
        UserError where there is no template, or it does not take these messages or variables.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a response: tokens that frame a sequence (BOS, EOS, padding) are left out.

        Other special tokens such as <think> or </answer> are part of the text that verifiers read. Ids beyond the
        tokenizer's vocabulary, which a model with a padded vocabulary may sample, add no text.
        """

    def decode_all(self, ids: Sequence[int]) -> str:
        """Like decode(), with BOS, EOS and padding written out. Stop strings are searched in it."""


def load_tokenizer(directory: Path, today: datetime.date | None = None) -> Tokenizer:
    """The tokenizer of a model directory: tokenizer.json (Hugging Face) if there, else tokenizer.model (sentencepiece).

    A tokenizer.json that was made of the tokenizer.model is left to others: sentencepiece starts sooner.
    today: the date that chat templates write; None: the date of this call.
    Raises UserError if there is neither, if a file is broken or if there is no end-of-sequence token.
    """
    pieces = (directory / "tokenizer.model").is_file()
    if (directory / "tokenizer.json").is_file() and not (pieces and _is_converted(directory)):
        from megatron_brorl.data.hf_tokenizer import HuggingFaceTokenizer  # transformers takes seconds to import

        return HuggingFaceTokenizer(directory, today)
    if pieces:
        return SentencePieceTokenizer(directory)
    refuse_gguf(directory)
    raise UserError(
        f"{directory}: no tokenizer.json and no tokenizer.model there; copy the tokenizer files of the model into it"
    )


def _is_converted(directory: Path) -> bool:
    from megatron_brorl.data.sentencepiece_export import is_converted  # protobuf takes a while to import

    return is_converted(directory)
