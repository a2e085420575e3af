"""Train a small sentencepiece tokenizer, for models of examples and tests."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path

import sentencepiece

from megatron_brorl.data.sentencepiece import MODEL, SETTINGS, SentencePieceTokenizer
from megatron_brorl.errors import UserError, shown

_BYTE_FALLBACK_FROM = 512  # pieces; in a smaller vocabulary, 256 byte tokens would leave no room for others
_LOG_ERRORS = 2  # sentencepiece's level of messages: errors only


def train_sentencepiece(texts: Iterable[str], directory: Path, vocab_size: int) -> SentencePieceTokenizer:
    """Train a BPE model on texts, write it to a directory and load it.

    Training is deterministic. Digits are single tokens, and white space survives a round trip. The vocabulary is
    smaller than vocab_size if the texts do not yield that many pieces. From 512 pieces on, unseen characters fall back
    to bytes.
    """
    # All characters are required, because the trainer misses some, such as a line break at the end of a text.
    texts = list(texts)
    characters = sorted(set().union(*texts) - {" ", "\0"})
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            character_coverage=1.0,
            required_chars="".join(characters),
            split_digits=True,
            byte_fallback=vocab_size >= _BYTE_FALLBACK_FROM,
            normalization_rule_name="identity",  # With the next two options, every text is decoded as it was.
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            max_sentence_length=1 << 24,
            num_threads=1,  # More threads would make the pieces depend on timing.
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            minloglevel=_LOG_ERRORS,
        )
    except (RuntimeError, OSError) as e:
        raise UserError(
            f"{directory}/{MODEL}: cannot train a tokenizer of {vocab_size} pieces: {shown(e)}; "
            "give more text or another vocabulary size"
        ) from None

    # transformers' LlamaTokenizer reads these settings.
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MODEL).write_bytes(model.getvalue())
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "add_bos_token": False,
        "add_eos_token": False,
        "add_prefix_space": False,
        "legacy": False,
        "clean_up_tokenization_spaces": False,
    }
    (directory / SETTINGS).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return SentencePieceTokenizer(directory)
