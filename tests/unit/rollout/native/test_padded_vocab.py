"""A vocabulary padded beyond the tokenizer's: additional ids are sampled and decode to nothing."""

from __future__ import annotations

import random

import pytest
import sentencepiece
import tiny
import tokenizers
import torch
from tiny_tokenizer import train_sentencepiece
from unit.data.test_tokenizers import make_hf
from unit.rollout.native.test_torch_engine import make_engine

from megatron_brorl.data.tokenizers import load_tokenizer
from megatron_brorl.ops.fused import decode as fused_decode
from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.types import Prompt

SIZE, PADDED = 512, 576
STOP_STRINGS = ("ab", "7", "é")


def texts():
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 7))) for _ in range(400)]
    return [f"{w} {draw.randint(0, 999)} naïve é 你好" for w in words]


def make_sentencepiece(directory):
    """Return a decoder of the directory and its size, written with sentencepiece only."""
    assert train_sentencepiece(texts(), directory, SIZE).vocab_size == SIZE
    library = sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    return lambda ids: library.decode([i for i in ids if i < SIZE and not library.is_control(i)]), SIZE


def make_bytes(directory):
    inner = tokenizers.Tokenizer.from_file(str(make_hf(directory) / "tokenizer.json"))
    size = inner.get_vocab_size()
    return lambda ids: inner.decode([i for i in ids if i < size], skip_special_tokens=True), size


@pytest.fixture(scope="module", params=[make_sentencepiece, make_bytes], ids=["sentencepiece", "hf"])
def padded(request, tmp_path_factory):
    """Return a tokenizer with its size, the library's decoder of its ids, and a model with a larger vocabulary."""
    directory = tmp_path_factory.mktemp("padded")
    module = tiny.make_model(directory, "qwen2", True, vocab_size=PADDED)
    decode, size = request.param(directory)
    return directory, load_tokenizer(directory), size, decode, module


def test_ids_beyond_the_tokenizer_decode_to_nothing(padded):
    """At every position of a text, also inside a character of several bytes."""
    _, tokenizer, size, decode, _ = padded
    for text in ("abc 12", "naïve é", "", "\U0001f642 x"):
        ids = tokenizer.encode(text)
        assert decode(ids) == text
        for place in range(len(ids) + 1):
            assert tokenizer.decode([*ids[:place], size, PADDED - 1, 10**6, *ids[place:]]) == text
    assert tokenizer.decode([size]) == tokenizer.decode([PADDED - 1, size]) == ""


def test_padded_ids_are_sampled_with_the_models_probabilities(padded):
    """Log-probs equal transformers' softmax over the whole vocabulary, and additional ids end no response."""
    directory, tokenizer, size, decode, module = padded
    engine = make_engine(directory, module, 100, fused_decode.sample_tokens, decode=tokenizer.decode)
    prompt = Prompt("p", "", (5, 9, 14), None, "exact")
    asked = [Request(prompt, 7, 64)]
    (free,) = engine.generate(asked, Sampling(1.0, 1.0, 0, 24, ()))
    (group,) = engine.generate(asked, Sampling(1.0, 1.0, 0, 24, (), STOP_STRINGS))
    for a, b in zip(free, group, strict=True):
        ids = a.token_ids.tolist()
        ends = [t for t in range(1, 25) if any(s in decode(ids[:t]) for s in STOP_STRINGS)]
        assert b.token_ids.tolist() == ids[: min(ends, default=24)]
        assert b.finish == ("stop" if ends else "length")
        expected = tiny.log_probs(module, prompt.token_ids, ids)
        torch.testing.assert_close(a.log_probs, expected, atol=1e-4, rtol=0)
    assert {b.finish for b in group} == {"stop", "length"}
    assert sum(int((r.token_ids >= size).sum()) for r in free) > 50
