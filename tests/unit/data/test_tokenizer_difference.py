"""Equal and different tokenizers, as the teacher of on-policy distillation needs them."""

from __future__ import annotations

import json

import pytest
from unit.data.test_tokenizers import CHAT, SUMS, make_hf

from megatron_brorl.data.sentencepiece import SentencePieceTokenizer, train_sentencepiece, write_tokenizer_json
from megatron_brorl.data.tokenizers import HuggingFaceTokenizer, load_tokenizer, tokenizer_difference


def reverse_merges(content):
    content["model"]["merges"].reverse()


def swap_ids(content):
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def add_token(content):
    content["added_tokens"].append({**content["added_tokens"][0], "id": 300, "content": "<think>"})


def make_plain(content):
    content["added_tokens"][2]["special"] = False


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: None, ""),
        (reverse_merges, "they give different ids to "),
        (swap_ids, "'a' is token 68 here and token 69 there"),
        (add_token, "'<think>' is no token here and special token 300 there"),
        (make_plain, "'<|user|>' is special token 2 here and token 2 there"),
    ],
)
def test_vocabulary_special_tokens_and_encoding_are_compared(tmp_path, change, said):
    """The BOS, the chat template and the EOS are another choice of the same tokenizer."""
    path = make_hf(tmp_path / "other", bos=True, chat_template=CHAT, eos_token="<|assistant|>") / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    found = tokenizer_difference(load_tokenizer(make_hf(tmp_path / "one")), load_tokenizer(tmp_path / "other"))
    assert found.startswith(said)
    assert bool(found) == bool(said)


def test_the_two_file_formats_of_a_tokenizer_are_equal(tmp_path):
    train_sentencepiece(SUMS, tmp_path, 600)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    write_tokenizer_json(tmp_path, tmp_path)
    one, exported = SentencePieceTokenizer(tmp_path), HuggingFaceTokenizer(tmp_path)
    assert tokenizer_difference(one, exported) == ""
    assert tokenizer_difference(exported, train_sentencepiece([*SUMS, "words"], tmp_path / "other", 600)) != ""
