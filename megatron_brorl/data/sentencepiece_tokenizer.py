"""sentencepiece models: loading one, and training a small one for a model made from nothing."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from megatron_brorl.data.chat import Message
from megatron_brorl.errors import UserError
from megatron_brorl.json_files import read_object

_BYTE_FALLBACK_FROM = 512  # below, 256 byte tokens would leave no room for anything else
_ERRORS_ONLY = 2


class SentencePieceTokenizer:
    """A tokenizer.model; whether prompts begin with BOS is said by tokenizer_config.json, as in Llama directories."""

    def __init__(self, directory: Path) -> None:
        """Raises UserError where tokenizer.model is none, or has no end-of-sequence token."""
        self.directory = directory
        self.template_date = None
        path = directory / "tokenizer.model"
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(path.read_bytes())
        except (RuntimeError, OSError) as e:
            raise UserError(f"{path}: not a sentencepiece model ({_one_line(e)}); copy it again") from None
        self.vocab_size = int(self._model.vocab_size())
        if self._model.eos_id() < 0:
            raise UserError(
                f"{path}: the tokenizer has no end-of-sequence token, so no response could end; train it with an eos_id"
            )
        self.eos_id = int(self._model.eos_id())
        self.bos_id = _optional(self._model.bos_id())
        self.pad_id = _optional(self._model.pad_id())
        self.unk_id = _optional(self._model.unk_id())
        self._decoder = _shows_control_pieces(self.serialized())
        self.leads_with_bos = self.bos_id is not None and _adds_bos(directory / "tokenizer_config.json")

    def encode(self, text: str) -> list[int]:
        return [int(i) for i in self._model.encode(text)]

    def encode_prompt(self, text: str, before: str = "", after: str = "") -> list[int]:
        ids = self.encode(before + text + after)
        return [self.bos_id, *ids] if self.leads_with_bos and self.bos_id is not None else ids

    def apply_chat(
        self, messages: Sequence[Message], variables: Mapping[str, Any] = MappingProxyType({})
    ) -> tuple[str, list[int]]:
        raise UserError(
            f"{self.directory}: data.chat = true, but a sentencepiece tokenizer has no chat template; "
            "set data.chat = false and write the frame of the prompt into data.template"
        )

    def piece(self, token_id: int) -> str:
        """The characters of a token as the model writes them, U+2581 for a space."""
        return str(self._model.id_to_piece(token_id))

    def serialized(self) -> bytes:
        """The content of tokenizer.model."""
        return bytes(self._model.serialized_model_proto())

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_all([i for i in ids if int(i) not in (self.bos_id, self.eos_id, self.pad_id)])

    def decode_all(self, ids: Sequence[int]) -> str:
        known = [int(i) for i in ids if 0 <= int(i) < self.vocab_size]  # sentencepiece raises on unknown ids
        return str(self._decoder.decode(known)) if known else ""


def train_sentencepiece(texts: Iterable[str], directory: Path, vocab_size: int) -> SentencePieceTokenizer:
    """Train a BPE model on the texts, write it to the directory and load it.

    Deterministic. Digits are single tokens and white space survives a round trip. The vocabulary is smaller than
    asked for where the texts do not yield that many pieces. From 512 pieces on, unseen characters fall back to bytes.
    """
    # All characters are named, because the trainer overlooks some: a line break at the end of a text.
    texts = list(texts)  # gone through twice
    characters = sorted(set().union(*texts) - {" ", "\0"})

    # Into memory, so that nothing is left behind where it fails.
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            hard_vocab_limit=False,  # few texts do not yield that many pieces
            character_coverage=1.0,  # none is left out for being rare
            required_chars="".join(characters),
            split_digits=True,  # numbers are read digit by digit
            byte_fallback=vocab_size >= _BYTE_FALLBACK_FROM,  # else what was never seen is <unk>
            normalization_rule_name="identity",  # with the next two: every text comes back as it was
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            max_sentence_length=1 << 24,  # longer ones are left out
            num_threads=1,  # for the same pieces every time
            # Numbers of the special tokens, in Llama's order.
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            minloglevel=_ERRORS_ONLY,
        )
    except (RuntimeError, OSError) as e:
        raise UserError(
            f"{directory}/tokenizer.model: cannot train a tokenizer of {vocab_size} pieces: {_one_line(e)}; "
            "give more text or another vocabulary size"
        ) from None

    # The special tokens by the numbers above, as transformers' LlamaTokenizer reads them.
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "add_bos_token": False,  # said outright: LlamaTokenizer's default is true
        "add_eos_token": False,
        "add_prefix_space": False,
        "legacy": False,
        "clean_up_tokenization_spaces": False,  # decoding gives every text back
    }

    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    # Read back from the files, as every later run will.
    return SentencePieceTokenizer(directory)


def _shows_control_pieces(serialized: bytes) -> Any:
    """A processor that decodes control pieces, such as a tag that is a special token, to their text.

    sentencepiece decodes them to nothing, and user-defined pieces to their text. Text is not encoded with it.
    """
    model = sentencepiece_model_pb2.ModelProto.FromString(serialized)
    for piece in model.pieces:
        if piece.type == piece.CONTROL:
            piece.type = piece.USER_DEFINED
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model.SerializeToString())
    return processor


def _adds_bos(path: Path) -> bool:
    if not path.is_file():
        return False
    config = read_object(path)
    llama = str(config.get("tokenizer_class", "")).startswith("LlamaTokenizer")  # whose default it is
    return bool(config.get("add_bos_token", llama))


def _optional(token_id: int) -> int | None:
    return int(token_id) if token_id >= 0 else None


def _one_line(e: Exception) -> str:
    return " ".join(str(e).split()) or type(e).__name__
