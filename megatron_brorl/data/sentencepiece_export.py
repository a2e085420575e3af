"""A sentencepiece model as the tokenizer.json that transformers reads, where that says exactly the same.

Without one transformers goes by config.json's model_type: it reads the pieces of a Qwen2 model as byte-level BPE and
drops what it does not find, spaces among them.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sentencepiece import sentencepiece_model_pb2

from megatron_brorl.data.sentencepiece_tokenizer import SentencePieceTokenizer
from megatron_brorl.errors import UserError
from megatron_brorl.json_files import read_object
from megatron_brorl.model_shape import CONFIG

MODEL, CONVERTED, SETTINGS = "tokenizer.model", "tokenizer.json", "tokenizer_config.json"
# transformers 5 reads every tokenizer.json of a Qwen2 model as Qwen2's own, unless its class is said to be special.
_OVERRIDDEN = "qwen2"
_CODE = "tokenization_fast.py"
_CLASS = "from transformers import PreTrainedTokenizerFast\n\n\nclass Tokenizer(PreTrainedTokenizerFast):\n    pass\n"
_SPACE = "\u2581"  # how pieces write a space
_PROBED = 2000  # pieces and overlaps that a conversion is checked on, at most
_ROWS = 300  # random texts of each kind that it is checked on


class InexactError(Exception):
    """What of a sentencepiece model the tokenizers library cannot do in the same way."""


def write_for_transformers(source: Path, target: Path) -> None:
    """Write tokenizer.json and what goes with it to `target` for a `source` that has a tokenizer.model alone.

    `target` is `source`, or has copies of its config.json and tokenizer files. Where transformers would give other ids
    all the same, stderr says so in one line, and nothing is written.
    """
    if not (source / MODEL).is_file() or (source / CONVERTED).is_file():
        return
    with tempfile.TemporaryDirectory() as name:
        aside = Path(name)
        try:
            tokenizer = SentencePieceTokenizer(source)
            _write(source, aside, tokenizer)
            _check(aside, tokenizer)
        except (InexactError, UserError) as e:
            print(
                f"warning: {source / MODEL}: cannot be written as {CONVERTED}: {e}; transformers may give other ids "
                "than this model was trained on: tokenize with sentencepiece",
                file=sys.stderr,
                flush=True,
            )
            return
        for path in aside.iterdir():
            shutil.copyfile(path, target / path.name)


def is_converted(directory: Path) -> bool:
    """Whether a directory's tokenizer.json is what its tokenizer.model says, and there is no chat template besides."""
    try:
        found = json.loads((directory / CONVERTED).read_text(encoding="utf-8"))
        settings = json.loads((directory / SETTINGS).read_text(encoding="utf-8"))
        chat = "chat_template" in settings or (directory / "chat_template.jinja").is_file()
        return not chat and found == convert(SentencePieceTokenizer(directory))
    except (OSError, ValueError, TypeError, RecursionError, InexactError, UserError):
        return False


def convert(tokenizer: SentencePieceTokenizer) -> dict[str, Any]:
    """The content of tokenizer.json. Raises InexactError for what has no counterpart there."""
    model = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.serialized())
    trained, normal, kind = model.trainer_spec, model.normalizer_spec, model.SentencePiece

    # What the tokenizers library has no counterpart for, or a different one.
    for unlike, what in (
        (trained.model_type != trained.BPE, "it is no BPE model"),
        (bool(normal.precompiled_charsmap), f"it normalizes text ({normal.name or 'by rules of its own'})"),
        (normal.remove_extra_whitespaces, "it removes white space (remove_extra_whitespaces)"),
        (not normal.escape_whitespaces, "it leaves white space as it is (escape_whitespaces = false)"),
        (trained.treat_whitespace_as_suffix, "it puts white space behind words (treat_whitespace_as_suffix)"),
        (any(p.type == kind.USER_DEFINED for p in model.pieces), "it has user-defined pieces"),
        (any(p.type == kind.UNUSED for p in model.pieces), "it has unused pieces"),
    ):
        if unlike:
            raise InexactError(what)

    # Pieces are merged from single characters, so that each of these must be a piece too.
    scores = {p.piece: p.score for p in model.pieces if p.type == kind.NORMAL}
    if not all(set(piece) <= scores.keys() for piece in scores):
        raise InexactError("a piece has a character that is none itself")
    # Fallback must be able to write any character.
    if trained.byte_fallback and sum(p.type == kind.BYTE for p in model.pieces) != 256:
        raise InexactError("it has not a piece for every byte")

    # Merges in the order of their scores; those of one piece are of one score.
    # sentencepiece joins the pair whose piece scores best, tokenizers the one that is first in its list.
    splits = [(piece[:i], piece[i:]) for piece in scores for i in range(1, len(piece))]
    merges = [(a, b) for a, b in splits if a in scores and b in scores]
    merges.sort(key=lambda pair: (-scores[pair[0] + pair[1]], len(pair[0])))

    prefix = normal.add_dummy_prefix  # a space before the text; lists are multiplied by it below
    # Marks that stand for no text.
    special = [i for i, p in enumerate(model.pieces) if p.type in (kind.CONTROL, kind.UNKNOWN)]

    # A tokenizer.json; null where a stage does nothing.
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special(i, model.pieces[i].piece) for i in special],
        # Text as pieces spell it.
        "normalizer": _sequence(
            "normalizers", [{"type": "Prepend", "prepend": _SPACE}] * prefix + [_replace(" ", _SPACE)]
        ),
        "pre_tokenizer": None,  # sentencepiece cuts no text before it merges
        "post_processor": _led_by(tokenizer) if tokenizer.leads_with_bos else None,
        # The way back: bytes become characters before the space at the start is dropped.
        "decoder": _sequence(
            "decoders",
            [_replace(_SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
            + [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * prefix,
        ),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if tokenizer.unk_id is None else tokenizer.piece(tokenizer.unk_id),
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,  # unknown characters side by side are one token, as there
            "byte_fallback": bool(trained.byte_fallback),
            "ignore_merges": False,  # a text that is a piece is merged like any other
            "vocab": {p.piece: i for i, p in enumerate(model.pieces)},  # ids are places in the model
            "merges": [[a, b] for a, b in merges],
        },
    }


def _write(source: Path, target: Path, tokenizer: SentencePieceTokenizer) -> None:
    settings = _settings(source, tokenizer)
    if (source / CONFIG).is_file():
        shutil.copyfile(source / CONFIG, target / CONFIG)
    if _read(source / CONFIG).get("model_type") == _OVERRIDDEN:
        settings["auto_map"] = {"AutoTokenizer": [f"{_CODE.removesuffix('.py')}.Tokenizer"] * 2}
        (target / _CODE).write_text(_CLASS, encoding="utf-8")
    converted = json.dumps(convert(tokenizer), ensure_ascii=False, indent=1)
    (target / CONVERTED).write_text(converted + "\n", encoding="utf-8")
    (target / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _settings(source: Path, tokenizer: SentencePieceTokenizer) -> dict[str, Any]:
    """The content of tokenizer_config.json. Raises InexactError where files of `source` add tokens to the model's."""
    found = {name: _read(source / name) for name in (SETTINGS, "special_tokens_map.json", "added_tokens.json")}
    settings = found[SETTINGS]
    added = [*found["added_tokens.json"], *settings.pop("added_tokens_decoder", {}).values()]
    for table in (settings, found["special_tokens_map.json"]):
        added += table.get("additional_special_tokens") or []
        added += [value for key, value in table.items() if key.endswith("_token") and isinstance(value, (str, dict))]
    pieces = {tokenizer.piece(i) for i in range(tokenizer.vocab_size)}
    for token in added:
        content = token.get("content") if isinstance(token, dict) else token
        if content not in pieces:
            raise InexactError(f"files beside it add the token {content!r}, which it does not have")

    for key in ("legacy", "add_prefix_space", "sp_model_kwargs", "auto_map"):
        settings.pop(key, None)  # of classes that build a tokenizer anew
    named = {"unk_token": tokenizer.unk_id, "bos_token": tokenizer.bos_id}
    named |= {"eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    settings |= {key: tokenizer.piece(i) for key, i in named.items() if i is not None}
    settings |= {"add_bos_token": tokenizer.leads_with_bos, "add_eos_token": False}
    return settings | {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}


def _read(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def _replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def _sequence(key: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "Sequence", key: parts}


def _special(token_id: int, piece: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token_id, "content": piece, **flags}


def _led_by(tokenizer: SentencePieceTokenizer) -> dict[str, Any]:
    """A post-processor that puts BOS before every sequence."""
    assert tokenizer.bos_id is not None
    bos = tokenizer.piece(tokenizer.bos_id)

    def led(letter: str, number: int) -> list[dict[str, Any]]:
        mark = {"SpecialToken": {"id": bos, "type_id": number}}
        return [mark, {"Sequence": {"id": letter, "type_id": number}}]

    special = {bos: {"id": bos, "ids": [tokenizer.bos_id], "tokens": [bos]}}
    return {
        "type": "TemplateProcessing",
        "single": led("A", 0),
        "pair": [*led("A", 0), *led("B", 1)],
        "special_tokens": special,
    }


def _check(directory: Path, tokenizer: SentencePieceTokenizer) -> None:
    """Raise InexactError unless transformers reads, of every text of _texts, the ids that training does."""
    from transformers import AutoTokenizer

    texts = list(_texts(json.loads((directory / CONVERTED).read_text(encoding="utf-8"))["model"]))
    try:
        theirs = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        # A text is data, in which "</s>" is four characters.
        found = theirs(texts, add_special_tokens=False, split_special_tokens=True, verbose=False).input_ids
        led = theirs("a").input_ids == tokenizer.encode_prompt("a")
        back = [theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) for ids in found]
    except Exception as e:  # of a library that raises almost anything
        raise InexactError(f"transformers cannot load that: {' '.join(str(e).split()) or type(e).__name__}") from None
    if not led:
        raise InexactError(f"transformers begins a text with other tokens: {theirs('a').input_ids}")
    for text, ids, again in zip(texts, found, back, strict=True):
        expected = tokenizer.encode(text)
        if ids != expected or (tokenizer.unk_id not in ids and again != tokenizer.decode(expected)):
            raise InexactError(f"transformers' {type(theirs).__name__} reads {text[:40]!r} otherwise")


def _texts(model: dict[str, Any]) -> Iterator[str]:
    """Pieces, overlaps where the order of merges shows, and random texts, the same ones for a model every time."""
    pieces = [piece.replace(_SPACE, " ") for piece in model["vocab"]]
    yield from pieces[:: max(1, len(pieces) // _PROBED)]
    # X Y Z with XY and YZ the same piece: sentencepiece takes the left one.
    overlaps = [a + b + (a + b)[len(b) :] for a, b in model["merges"] if (a + b).startswith(b)]
    yield from (x.replace(_SPACE, " ") for x in overlaps[:: max(1, len(overlaps) // _PROBED)])
    draw = random.Random(0)
    # What a character may be: ASCII with control characters, Latin, any plane (but halves of surrogate pairs).
    ranges = ((0x20, 0x7E), (0x00, 0x7F), (0x80, 0x24F), (0xE000, 0x1FAFF), (0x00, 0xD7FF))
    for _ in range(_ROWS):
        yield "".join(draw.choices(pieces, k=draw.randint(1, 20)))
        yield "".join(draw.choices([" ", "  ", "\n", "\t", *pieces], k=draw.randint(1, 20)))
        for low, high in ranges:
            yield "".join(chr(draw.randint(low, high)) for _ in range(draw.randint(1, 20)))
