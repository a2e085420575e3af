"""Equal and different tokenizers, as the teacher of on-policy distillation needs them."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import AddedToken
from unit.data.test_tokenizers import CHAT, SUMS, make_hf

from megatron_brorl.data.sentencepiece import SentencePieceTokenizer, train_sentencepiece, write_tokenizer_json
from megatron_brorl.data.tokenizers import HuggingFaceTokenizer, load_tokenizer, tokenizer_difference


def edited(folder, change):
    """Write the tokenizer of make_hf with a change of its tokenizer.json."""
    path = make_hf(folder) / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def last_merges_first(content):
    content["model"]["merges"].reverse()


def swap_ids(content):
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def not_special(content):
    content["added_tokens"][2]["special"] = False


def test_chat_templates_and_eos_may_differ(tmp_path):
    one = load_tokenizer(make_hf(tmp_path / "one"))
    other = load_tokenizer(make_hf(tmp_path / "other", bos=True, chat_template=CHAT, eos_token="<|user|>"))
    assert tokenizer_difference(one, other) == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (last_merges_first, "they give different ids to "),
        (swap_ids, "'a' is token 68 here and token 69 there"),
        (not_special, "'<|user|>' is special token 2 here and token 2 there"),
    ],
)
def test_another_tokenizer_of_equal_size(tmp_path, change, said):
    edited(tmp_path / "other", change)
    one, other = load_tokenizer(make_hf(tmp_path / "one")), load_tokenizer(tmp_path / "other")
    assert one.vocab_size == other.vocab_size
    assert tokenizer_difference(one, other).startswith(said)


@pytest.mark.parametrize("special", [True, False])
def test_an_added_token(tmp_path, special):
    path = make_hf(tmp_path / "other") / "tokenizer.json"
    inner = tokenizers.Tokenizer.from_file(str(path))
    inner.add_tokens([AddedToken("<think>", special=special)])
    inner.save(str(path))
    one, other = load_tokenizer(make_hf(tmp_path / "one")), load_tokenizer(tmp_path / "other")
    kind = "special token" if special else "token"
    assert tokenizer_difference(one, other) == f"'<think>' is no token here and {kind} {one.vocab_size} there"


def test_the_two_file_formats_of_one_tokenizer(tmp_path):
    """A sentencepiece model equals its export, and differs from one that was trained on other texts."""
    one = train_sentencepiece(SUMS, tmp_path, 600)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    write_tokenizer_json(tmp_path, tmp_path)
    exported = HuggingFaceTokenizer(tmp_path)
    assert tokenizer_difference(SentencePieceTokenizer(tmp_path), exported) == ""
    other = train_sentencepiece([*SUMS, "other words"], tmp_path / "other", 600)
    assert tokenizer_difference(one, other) != ""
    assert tokenizer_difference(exported, other) != ""
