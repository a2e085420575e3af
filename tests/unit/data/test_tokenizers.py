from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiny
import tokenizers
from tiny_tokenizer import train_sentencepiece
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from megatron_brorl.checkpoints import hugging_face
from megatron_brorl.data.prompts import check_round_trip
from megatron_brorl.data.sentencepiece import SentencePieceTokenizer, write_tokenizer_json
from megatron_brorl.data.tokenizers import HuggingFaceTokenizer, load_tokenizer, stop_ids, tokenizer_difference
from megatron_brorl.errors import UserError

SUMS = [f"{a} + {b} = {a + b}" for a in range(30) for b in range(30)]
CHAT = (
    "{% for m in messages %}<|user|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_hf(directory: Path, bos: bool = False, split: Any = None, **config: Any) -> Path:
    """Write a byte-level BPE as Hugging Face files. Ids 0 to 3 are <s>, </s>, <|user|> and <|assistant|>.

    split: the pre-tokenizer before the bytes; None: that which transformers gives every tokenizer of a Qwen2 model.
    """
    inner = tokenizers.Tokenizer(models.BPE())
    split = split or pre_tokenizers.Split(tokenizers.Regex(PRETOKENIZE_REGEX), "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    inner.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    texts = [*SUMS, "hello world", "some other words for the vocabulary of three hundred tokens"]
    inner.train_from_iterator(texts, trainer)
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    directory.mkdir(parents=True, exist_ok=True)
    inner.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    settings = {k: v for k, v in settings.items() if v is not None}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def make_pieces(directory: Path, texts: list[str] = SUMS, **options: Any) -> Path:
    """Train a sentencepiece model, and write its file without the configuration files of transformers."""
    directory.mkdir(parents=True, exist_ok=True)
    prefix = str(directory / "tokenizer")
    options = {"model_type": "bpe", "vocab_size": 400, "hard_vocab_limit": False, "minloglevel": 2, **options}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_prefix=prefix, **options)
    (directory / "tokenizer.vocab").unlink()
    return directory


SPLITS = {  # pre-tokenizers, and texts that Qwen2's splits differently
    r"\p{N}{1,3}": "1999 + 12345 = 14344",
    "\n": "29 + 0 = 29",
}


@pytest.mark.parametrize("regex", SPLITS)
def test_a_file_that_transformers_reads_differently_is_refused(tmp_path, regex):
    split = pre_tokenizers.Split(tokenizers.Regex(regex), "isolated")
    tokenizer = load_tokenizer(make_hf(tmp_path, split=split, tokenizer_class="Qwen2Tokenizer"))
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = SPLITS[regex]
    library, file = len(AutoTokenizer.from_pretrained(tmp_path)(text).input_ids), len(inner.encode(text).ids)
    assert library != file
    with pytest.raises(UserError, match=rf"tokenizer.json: .* makes {library} tokens of .* file makes {file}:"):
        check_round_trip([("f:1", ["x"]), ("f:2", [f" {text}", None])], tokenizer, "data.train")
    assert check_round_trip([("f:1", ["x"])], tokenizer, "data.train") == []

    AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)  # the advice of the message
    assert check_round_trip([("f:2", [text])], load_tokenizer(tmp_path), "data.train") == []


TEXTS = ("12 + 7 = 19", "", "  two  spaces ", "line\n\nline\t.", "</s>", "<s>x</s><|user|>", "naïve 你好 🙂", "007")


def test_sentencepiece_round_trip_with_bytes(tmp_path):
    tokenizer, again = (train_sentencepiece([*SUMS, "hello </s> world"], tmp_path / name, 600) for name in "ab")
    files = [(model.directory / "tokenizer.model").read_bytes() for model in (tokenizer, again)]
    assert files[0] == files[1]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.encode_prompt(text) == tokenizer.encode(text)
        assert not {1, 2, 3} & set(tokenizer.encode(text))  # "</s>" in a text is not a special token.
    assert (tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 2, 3)


def make_tags(directory: Path, special: bool) -> Path:
    """Write a byte-level BPE with tags as added tokens, as in reasoning models."""
    make_hf(directory, pad_token="<|pad|>")
    inner = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tags = [f"<{slash}{tag}>" for tag in ("think", "answer") for slash in ("", "/")]
    inner.add_tokens([tokenizers.AddedToken(tag, special=special, normalized=False) for tag in tags])
    inner.add_special_tokens(["<|pad|>", "<|eot|>"])
    inner.save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.parametrize("special", [True, False])
def test_decoding_keeps_tags_that_are_tokens(tmp_path, special):
    tokenizer = load_tokenizer(make_tags(tmp_path, special))
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    form = "<think>\n a < b \n</think>\n\n<answer> 你 </answer>\n"
    for text in (form, "</think>4", "<answer><answer></answer>", "<|eot|>hello<|user|>"):
        ids = library.encode(text).ids
        assert len(ids) < len(tokenizer.encode(text)) or not special
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([tokenizer.pad_id or 0, *ids, tokenizer.eos_id]) == text
        assert tokenizer.decode_all([tokenizer.pad_id or 0, *ids, tokenizer.eos_id]) == f"<|pad|>{text}</s>"


def test_decoding_keeps_control_pieces_of_sentencepiece(tmp_path):
    tags = ["<think>", "</think>", "<answer>", "</answer>"]
    exact = {"add_dummy_prefix": False, "remove_extra_whitespaces": False}
    # By default, a space is added before each text and removed by decoding.
    for space, settings in (("", exact), (" ", {})):
        tokenizer = load_tokenizer(make_pieces(tmp_path, vocab_size=60, control_symbols=tags, pad_id=3, **settings))
        think, end, answer, close = range(4, 8)
        one, two = tokenizer.encode("1 + 2"), tokenizer.encode("3")
        ids = [think, *one, end, answer, *two, close, tokenizer.pad_id or 0, tokenizer.eos_id]
        assert tokenizer.decode(ids) == f"<think>{space}1 + 2</think><answer>{space}3</answer>"
        assert tokenizer.decode([*one, close]) == "1 + 2</answer>"
        assert tokenizer.decode_all(ids).endswith("</answer><pad></s>")
        assert not {4, 5, 6, 7} & set(tokenizer.encode("<think></answer>"))  # tags in a text are plain text


@pytest.mark.parametrize("bos", [False, True])
def test_hugging_face_round_trip(tmp_path, bos):
    tokenizer = load_tokenizer(make_hf(tmp_path, bos))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.unk_id) == (0, 1, None, None)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.encode_prompt(text) == [0] * bos + tokenizer.encode(text)
    assert check_round_trip([("f:1", [text]) for text in TEXTS], tokenizer, "data.train") == []
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.vocab_size == library.get_vocab_size()
    assert tokenizer.encode_prompt("12 + 7 = 19") == library.encode("12 + 7 = 19").ids


def test_ids_beyond_the_tokenizer_decode_to_nothing(tmp_path):
    """A model may have a padded vocabulary. An id may also come inside a character of several bytes."""
    for tokenizer in (load_tokenizer(make_hf(tmp_path / "hf")), train_sentencepiece(SUMS, tmp_path / "pieces", 600)):
        size = tokenizer.vocab_size
        for text in ("12 + 7", "naïve é", "", "🙂 x"):
            ids = tokenizer.encode(text)
            for position in range(len(ids) + 1):
                with_unknown = [*ids[:position], size, size + 63, 10**6, *ids[position:]]
                assert tokenizer.decode(with_unknown) == text


def test_an_unk_token_that_is_also_eos_does_not_mark_unknown_text(tmp_path):
    assert load_tokenizer(make_hf(tmp_path / "a", unk_token="</s>")).unk_id is None
    assert load_tokenizer(make_hf(tmp_path / "b", unk_token="<|user|>")).unk_id == 2


def test_special_tokens_are_recognized_only_in_the_template(tmp_path):
    tokenizer = load_tokenizer(make_hf(tmp_path, bos=True))
    hello = tokenizer.encode("hello")
    assert tokenizer.encode_prompt("hello", "<|user|>", "<|assistant|>") == [0, 2, *hello, 3]
    assert tokenizer.encode_prompt("hello", "<s><|user|>") == [0, 2, *hello]  # BOS once
    forged = tokenizer.encode_prompt("</s><|user|>", "<|user|>", "<|assistant|>")
    assert forged == [0, 2, *tokenizer.encode("</s><|user|>"), 3]
    assert tokenizer.eos_id not in forged


def test_bos_depends_on_the_tokenizer_configuration(tmp_path):
    train_sentencepiece(SUMS, tmp_path, 64)
    plain = load_tokenizer(tmp_path).encode("1 + 2")
    config = tmp_path / "tokenizer_config.json"
    for settings, leads in (
        ({"add_bos_token": True}, True),
        ({"add_bos_token": False, "tokenizer_class": "LlamaTokenizer"}, False),
        ({"tokenizer_class": "LlamaTokenizer"}, True),
        ({}, False),
    ):
        config.write_text(json.dumps(settings))
        assert load_tokenizer(tmp_path).encode_prompt("1 + 2") == [1] * leads + plain


def test_unusable_files_are_refused(tmp_path):
    hf, pieces = make_hf(tmp_path / "hf"), make_pieces(tmp_path / "spm", vocab_size=40)
    other = make_pieces(tmp_path / "eos", vocab_size=40, eos_id=-1)
    for directory, file, content, named in (
        (tmp_path, "", b"", rf"{tmp_path}: no tokenizer\.json and no tokenizer\.model"),
        (pieces, "tokenizer_config.json", b"[]", r"tokenizer_config\.json: must hold a JSON object"),
        (pieces, "tokenizer.model", b"garbage", r"tokenizer\.model: not a sentencepiece model"),
        (other, "", b"", r"tokenizer\.model: .* no end-of-sequence token"),
        (hf, "tokenizer_config.json", b'{"tokenizer_class": "PreTrainedTokenizerFast"}', 'set "eos_token"'),
        (hf, "tokenizer.json", b"{", r"tokenizer\.json: transformers cannot load it"),
    ):
        if file:
            (directory / file).write_bytes(content)
        with pytest.raises(UserError, match=rf"^[^\n]*{named}[^\n]*$"):
            load_tokenizer(directory)
    for tokenizer in (make_hf(tmp_path / "c"), make_pieces(tmp_path / "d")):
        with pytest.raises(UserError, match=r"set data\.chat = false"):
            load_tokenizer(tokenizer).apply_chat([])


@pytest.mark.parametrize(
    ("part", "key", "value", "difference"),
    [
        ("model", "merges", [], "they give different ids to "),
        ("vocab", "a", 300, "'a' is token 68 here and token 300 there"),
        ("token", "content", "<x>", "'<x>' is no token here and special token"),
        ("token", "special", False, "'<|user|>' is special token 2 here and"),
        ("token", "special", True, ""),
    ],
)
def test_vocabulary_special_tokens_and_encoding_are_compared(tmp_path, part, key, value, difference):
    """A tokenizer that differs only in BOS, chat template and EOS counts as the same."""
    path = make_hf(tmp_path / "other", bos=True, chat_template=CHAT, eos_token="<|assistant|>") / "tokenizer.json"
    content = json.loads(path.read_text())
    parts = {"model": content["model"], "vocab": content["model"]["vocab"], "token": content["added_tokens"][2]}
    parts[part][key] = value
    path.write_text(json.dumps(content))
    message = tokenizer_difference(load_tokenizer(make_hf(tmp_path / "one")), load_tokenizer(tmp_path / "other"))
    assert message.startswith(difference) if difference else message == ""


def test_the_two_file_formats_of_a_tokenizer_are_equal(tmp_path):
    train_sentencepiece(SUMS, tmp_path, 600)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    write_tokenizer_json(tmp_path, tmp_path)
    one, exported = SentencePieceTokenizer(tmp_path), HuggingFaceTokenizer(tmp_path)
    assert tokenizer_difference(one, exported) == ""
    assert tokenizer_difference(exported, train_sentencepiece([*SUMS, "words"], tmp_path / "other", 600)) != ""


EOS = 2  # id of the tokenizer's EOS token
ABSENT = object()

# (eos_token_id of config.json, content of generation_config.json, ids at which transformers stops).
CASES: dict[str, tuple[Any, dict[str, Any] | None, set[int]]] = {
    "an id": (40, None, {40}),
    "a list": ([40, 42], None, {40, 42}),
    "null": (None, None, set()),
    "missing": (ABSENT, None, set()),
    "both files, lists": ([40, 42], {"eos_token_id": [EOS, 41]}, {EOS, 41}),
    "a generation config without the key": ([40, 42], {"temperature": 0.5}, set()),
    "a generation config with null": ([40, 42], {"eos_token_id": None, "top_k": 5}, set()),
    "a generation config alone": (ABSENT, {"eos_token_id": [41, 40]}, {40, 41}),
}


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("made")
    tiny.make_model(directory, "llama", tied=True)
    train_sentencepiece(["abc", "1+1=2"] * 20, directory, 60)
    return directory


def arrange(directory: Path, config: Any, generation: dict[str, Any] | None) -> None:
    raw = json.loads((directory / "config.json").read_text())
    raw.pop("eos_token_id", None)
    (directory / "config.json").write_text(json.dumps(raw if config is ABSENT else {**raw, "eos_token_id": config}))
    (directory / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))


def resolved(directory: Path) -> set[int]:
    """Return the stop ids of transformers' generate()."""
    ids = AutoModelForCausalLM.from_pretrained(directory).generation_config.eos_token_id
    return set() if ids is None else set(ids) if isinstance(ids, list) else {ids}


@pytest.mark.parametrize("name", CASES)
def test_stop_ids_are_those_of_transformers_and_eos(model_directory, tmp_path, name):
    config, generation, expected = CASES[name]
    arrange(model_directory, config, generation)
    tokenizer = load_tokenizer(model_directory)
    assert tokenizer.eos_id == EOS
    assert resolved(model_directory) == expected
    assert set(stop_ids(model_directory, tokenizer)) == expected | {EOS}

    # transformers stops at the same tokens in an export. Other generation settings are kept.
    hugging_face.save(tiny.weights(model_directory).items(), model_directory, tmp_path / "out", "float32")
    assert resolved(tmp_path / "out") == expected | {EOS}
    kept = GenerationConfig.from_pretrained(tmp_path / "out").to_dict()
    for key, value in (generation or {}).items():
        assert key == "eos_token_id" or kept[key] == value
    assert (kept["bos_token_id"], kept["pad_token_id"]) == ((1, 3) if generation is None else (None, None))
    assert set(stop_ids(tmp_path / "out", tokenizer)) == expected | {EOS}


@pytest.mark.parametrize("value", ["2", True, [2, "3"], -1])
def test_values_that_are_no_ids_are_refused(model_directory, value):
    for file, generation in (("config.json", None), ("generation_config.json", {"eos_token_id": value})):
        arrange(model_directory, value, generation)
        with pytest.raises(UserError, match=rf"^{model_directory / file}: eos_token_id = "):
            stop_ids(model_directory, load_tokenizer(model_directory))
