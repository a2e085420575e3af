"""Where tokens end in a text, against decoding every prefix, with both kinds of tokenizers."""

from __future__ import annotations

import pytest
from unit.data.test_tokenizers import SUMS, make_hf

from megatron_brorl.data.tokenizers import load_tokenizer, train_sentencepiece
from megatron_brorl.train.token_ends import TokenEnds


@pytest.fixture(scope="module", params=["sentencepiece", "byte-level BPE"])
def tokenizer(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    if request.param == "sentencepiece":
        return train_sentencepiece([*SUMS, "hello world two spaces"], directory, 600)
    return load_tokenizer(make_hf(directory / "hf"))


@pytest.mark.parametrize("text", ["12 + 7 = 19", "", " ", "  two  spaces ", "line\n\nline.", "hello world"])
def test_ends_are_those_of_every_prefix(tokenizer, text):
    ids = tokenizer.encode(text)
    ends = TokenEnds(tokenizer.decode).of(ids, tokenizer.decode(ids))
    assert ends == [len(tokenizer.decode(ids[: i + 1])) for i in range(len(ids))]


def test_parts_of_a_character_are_not_told_wrongly(tokenizer):
    """One of several bytes takes several tokens: the ends are told only where they add up."""
    asked = TokenEnds(tokenizer.decode)
    for text in ("naïve 12", "你好", "7 🙂 8"):
        ids = tokenizer.encode(text)
        ends = asked.of(ids, tokenizer.decode(ids))
        assert ends is None or (ends == sorted(ends) and ends[-1] == len(text))
    ids = tokenizer.encode("hello")
    assert asked.of(ids, "hello world") is None
