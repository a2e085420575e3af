"""sentencepiece tokenizers: loading, and export for transformers.

Without a tokenizer.json, transformers reads tokenizer.model according to the model_type in config.json. For a Qwen2
model it treats the pieces as byte-level BPE and drops spaces. The export uses the converter of transformers and keeps
the result only if it encodes many texts exactly as sentencepiece does.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from megatron_brorl.data.chat import NONE, Message, Variables, plain_ids
from megatron_brorl.environments.interface import Format
from megatron_brorl.errors import UserError, shown, warn
from megatron_brorl.families.shape import CONFIG
from megatron_brorl.files import read_object

MODEL = "tokenizer.model"
CONVERTED = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
_EXPORT_MARK = "sentencepiece_export"  # in tokenizer_config.json: SHA-256 of the tokenizer.json that was written
# For this model_type, transformers 5 uses its Qwen2 tokenizer instead of the class that tokenizer_config.json names,
# unless a Python file next to it defines the class.
_OVERRIDDEN = "qwen2"
_CLASS_FILE = "tokenization_fast.py"
_CLASS = "from transformers import PreTrainedTokenizerFast\n\n\nclass Tokenizer(PreTrainedTokenizerFast):\n    pass\n"
MAX_CHECKED_PIECES = 2000  # of a vocabulary, evenly spaced; the real number may be up to twice as large
_CHECKED_TEXTS = 300  # rounds of random texts, six texts each


class SentencePieceTokenizer:
    """A tokenizer.model. Its tokenizer_config.json determines whether prompts begin with BOS, as for Llama."""

    template_date = None

    def __init__(self, directory: Path) -> None:
        """Raise UserError if tokenizer.model is invalid or has no end-of-sequence token."""
        self.directory = directory
        path = directory / MODEL
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(path.read_bytes())
        except (RuntimeError, OSError) as e:
            raise UserError(f"{path}: not a sentencepiece model ({shown(e)}); copy it again") from None
        self.vocab_size = int(self._model.vocab_size())
        if self._model.eos_id() < 0:
            raise UserError(
                f"{path}: the tokenizer has no end-of-sequence token, so no response could end; train it with an eos_id"
            )
        self.eos_id = int(self._model.eos_id())
        ids = (self._model.bos_id(), self._model.pad_id(), self._model.unk_id())
        self.bos_id, self.pad_id, self.unk_id = (i if i >= 0 else None for i in ids)

        # Decoding shows control pieces, such as <think>, as text instead of dropping them.
        proto = self.proto()
        for piece in proto.pieces:
            if piece.type == piece.CONTROL:
                piece.type = piece.USER_DEFINED
        self._decoder = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
        settings = _read(directory / SETTINGS)
        is_llama = str(settings.get("tokenizer_class", "")).startswith("LlamaTokenizer")  # It adds BOS by default.
        self.leads_with_bos = self.bos_id is not None and bool(settings.get("add_bos_token", is_llama))

    def template_reads(self, variable: str, tools: Any = None) -> bool:
        return False

    def call_format(self, variables: Variables = NONE) -> Format:
        return "tags"

    def encode(self, text: str) -> list[int]:
        return [int(i) for i in self._model.encode(text)]

    def encode_prompt(self, text: str, before: str = "", after: str = "") -> list[int]:
        ids = self.encode(before + text + after)
        return [self.bos_id, *ids] if self.leads_with_bos and self.bos_id is not None else ids

    def apply_chat(self, messages: Sequence[Message], variables: Variables = NONE) -> tuple[str, list[int]]:
        raise UserError(
            f"{self.directory}: data.chat = true, but a sentencepiece tokenizer has no chat template; "
            "set data.chat = false and write the frame of the prompt into data.template"
        )

    def continuation(
        self, messages: Sequence[Message], chat: bool, variables: Variables = NONE, after_stop: bool = True
    ) -> list[int]:
        if chat:
            self.apply_chat(messages, variables)  # raises UserError
        return plain_ids(messages, self.encode, self.eos_id)

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_all([i for i in ids if int(i) not in (self.bos_id, self.eos_id, self.pad_id)])

    def decode_all(self, ids: Sequence[int]) -> str:
        known = [int(i) for i in ids if 0 <= int(i) < self.vocab_size]  # sentencepiece raises for unknown ids
        return str(self._decoder.decode(known)) if known else ""

    def piece(self, token_id: int) -> str:
        """Return the piece of a token id, in which U+2581 stands for a space."""
        return str(self._model.id_to_piece(token_id))

    def vocabulary(self) -> dict[str, tuple[int, bool]]:
        pieces = enumerate(self.proto().pieces)
        return {piece.piece: (i, piece.type in (piece.CONTROL, piece.UNKNOWN)) for i, piece in pieces}

    def proto(self) -> Any:
        """Return the model as a protobuf message."""
        return sentencepiece_model_pb2.ModelProto.FromString(self._model.serialized_model_proto())


def write_tokenizer_json(source: Path, target: Path) -> None:
    """Write tokenizer.json and its settings to `target` for a `source` that has only a tokenizer.model.

    `target` is `source`, or has copies of its config.json and tokenizer files. If transformers would read other ids
    than sentencepiece, nothing is written and stderr says so in one line.
    """
    if not (source / MODEL).is_file() or (source / CONVERTED).is_file():
        return
    with tempfile.TemporaryDirectory() as folder:
        export = Path(folder)
        try:
            tokenizer = SentencePieceTokenizer(source)
            _convert(source, export, tokenizer)
            reason = _difference(export, tokenizer)
        except UserError as e:
            reason = str(e)
        except Exception as e:  # The converter of another release of transformers may raise anything.
            reason = f"transformers cannot convert it: {type(e).__name__}: {shown(e)}"
        if reason:
            warn(
                f"{source / MODEL}: no {CONVERTED} written: {reason}; transformers may use other ids than this model "
                "was trained on: tokenize with sentencepiece"
            )
            return
        for path in export.iterdir():
            shutil.copyfile(path, target / path.name)


def is_exported(directory: Path) -> bool:
    """Return whether tokenizer.json is an unchanged export of tokenizer.model, without a chat template."""
    try:
        settings = json.loads((directory / SETTINGS).read_text(encoding="utf-8"))
        digest = hashlib.sha256((directory / CONVERTED).read_bytes()).hexdigest()
        chat = "chat_template" in settings or (directory / "chat_template.jinja").is_file()
        return not chat and settings.get(_EXPORT_MARK) == digest
    except (OSError, ValueError, TypeError, AttributeError):
        return False


def _convert(source: Path, target: Path, tokenizer: SentencePieceTokenizer) -> None:
    """Write the files of an export to an empty directory."""
    from tokenizers import AddedToken, processors
    from transformers.convert_slow_tokenizer import SpmConverter

    proto = tokenizer.proto()
    scored = [(piece.piece, piece.score) for piece in proto.pieces]
    is_bpe = proto.trainer_spec.model_type == proto.trainer_spec.BPE
    vocabulary = {piece: i for i, (piece, _) in enumerate(scored)} if is_bpe else scored
    converted: Any = SpmConverter.build_tokenizer_from_spm_proto(proto, vocabulary)
    special = [p.piece for p in proto.pieces if p.type in (p.CONTROL, p.UNKNOWN)]
    converted.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in special])
    if tokenizer.leads_with_bos and tokenizer.bos_id is not None:
        bos = tokenizer.piece(tokenizer.bos_id)
        converted.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.bos_id)]
        )
    converted.save(str(target / CONVERTED))

    # transformers loads the converted file directly, so settings of classes that rebuild a tokenizer do not apply.
    settings = {key: value for key, value in _read(source / SETTINGS).items() if key != "added_tokens_decoder"}
    for key in ("legacy", "add_prefix_space", "sp_model_kwargs", "auto_map"):
        settings.pop(key, None)
    ids = {"unk": tokenizer.unk_id, "bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}
    settings |= {f"{name}_token": tokenizer.piece(i) for name, i in ids.items() if i is not None}
    settings |= {"add_bos_token": tokenizer.leads_with_bos, "add_eos_token": False}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings[_EXPORT_MARK] = hashlib.sha256((target / CONVERTED).read_bytes()).hexdigest()
    for name in (CONFIG, "special_tokens_map.json", "added_tokens.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    if _read(source / CONFIG).get("model_type") == _OVERRIDDEN:
        # AutoTokenizer reads a pair: the slow and the fast class. This class serves as both.
        settings["auto_map"] = {"AutoTokenizer": [f"{_CLASS_FILE.removesuffix('.py')}.Tokenizer"] * 2}
        (target / _CLASS_FILE).write_text(_CLASS, encoding="utf-8")
    (target / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _difference(directory: Path, tokenizer: SentencePieceTokenizer) -> str:
    """Return how transformers tokenizes the export differently from sentencepiece; "" if it does not."""
    from transformers import AutoTokenizer

    texts = list(check_texts([tokenizer.piece(i).replace("\u2581", " ") for i in range(tokenizer.vocab_size)]))
    loaded = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    if len(loaded) != tokenizer.vocab_size:
        return f"it has {tokenizer.vocab_size} tokens, but {len(loaded)} with the files next to it"
    if loaded.eos_token_id != tokenizer.eos_id or loaded("a").input_ids != tokenizer.encode_prompt("a"):
        return "transformers begins or ends a text with other tokens"
    loaded_ids = loaded(texts, add_special_tokens=False, split_special_tokens=True, verbose=False).input_ids
    for text, ids in zip(texts, loaded_ids, strict=True):
        decoded = loaded.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if ids != tokenizer.encode(text) or (tokenizer.unk_id not in ids and decoded != tokenizer.decode(ids)):
            return f"transformers' {type(loaded).__name__} tokenizes {text[:40]!r} differently"
    return ""


def check_texts(pieces: list[str]) -> Iterator[str]:
    """Yield pieces and random texts, on which tokenizers are compared. Equal pieces yield equal texts."""
    yield from pieces[:: max(1, len(pieces) // MAX_CHECKED_PIECES)]
    rng = random.Random(0)
    # ASCII with control characters, Latin, and all other characters except halves of surrogate pairs.
    ranges = ((0x00, 0x7F), (0x80, 0x24F), (0xE000, 0x1FAFF), (0x00, 0xD7FF))
    for _ in range(_CHECKED_TEXTS):
        yield "".join(rng.choices([" ", "  ", "\n", "\t", *pieces], k=rng.randint(1, 20)))
        # Repetitions of a piece show the order of merges.
        yield "".join(piece * rng.randint(1, 4) for piece in rng.choices(pieces, k=rng.randint(1, 5)))
        for low, high in ranges:
            yield "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 20)))


def _read(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}
