"""Check that transformers tokenizes an exported model exactly as the sentencepiece library does in training."""

from __future__ import annotations

import json
import random
import shutil
import sys
from itertools import product
from pathlib import Path
from typing import Any

import conversions
import make_tiny_model
import pytest
import sentencepiece
import tiny
from safetensors.torch import load_file
from transformers import AutoTokenizer, GenerationConfig
from unit.data.test_tokenizers import make_pieces

from megatron_brorl.checkpoints import hugging_face
from megatron_brorl.config.schema import DataConfig
from megatron_brorl.data.prompts import render
from megatron_brorl.data.tokenizers import load_tokenizer
from megatron_brorl.families.shape import read_shape
from megatron_brorl.models.weights.names import hf_shapes

pytest.importorskip("transformers", "5.24", "older ones read exported files differently, and the export warns")
REPOSITORY = Path(__file__).parents[3]
CORPUS = [f"{a} + {b} = {a + b}" for a in range(40) for b in range(40)]
CORPUS += ["aaaa aaa aa a aaaaaa baaab  aa  aaa    x", "ababab abab ababa babab bab", "naïve café hello == ==="] * 40
LLAMA = {"add_dummy_prefix": True, "byte_fallback": True, "split_digits": True}


def train(directory: Path, **options: Any) -> Path:
    """Train a sentencepiece model that changes no text unless the options say so."""
    settings = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": False}
    return make_pieces(directory, CORPUS, **{**settings, "allow_whitespace_only_pieces": True, **options})


def model_around(tokenizer: Path, family: str, target: Path) -> Path:
    """Create a model directory that has tokenizer.model but no tokenizer.json."""
    tiny.make_model(target, family, True, vocab_size=512)
    (target / "generation_config.json").unlink()
    for path in tokenizer.iterdir():
        shutil.copyfile(path, target / path.name)
    return target


def export(source: Path, target: Path) -> Path:
    tensors = load_file(source / "model.safetensors")
    hugging_face.save(((name, tensors[name]) for name in hf_shapes(read_shape(source))), source, target, "float32")
    return target


def texts(pieces: list[str]) -> list[str]:
    """Return texts with digits, white space, emoji, control characters and random pieces."""
    draw = random.Random(20)
    chosen = ["", " ", "  two", "12 ", "007", "a\n\n b\t", "e\u0301é", "🙂 🙂🏽‍🚀", "</s>", "<s>1</s><pad><unk>"]
    chosen += ["<0x41>", "\u2581\u2581", "\x00\x7f\x85", "\u2028\ufffd"]
    unicode = [chr(c) for c in (*range(0x80, 0xD800), *range(0xE000, 0x110000))]  # no surrogates
    kinds = [list("0123456789,= +"), list("ab  \n\t"), [chr(c) for c in range(128)], unicode, pieces]
    return chosen + ["".join(draw.choices(kind, k=draw.randint(1, 24))) for kind in kinds for _ in range(150)]


def assert_same(model: Path, leads: bool = False) -> None:
    """Compare AutoTokenizer with the sentencepiece library. leads: whether BOS comes first."""
    library = sentencepiece.SentencePieceProcessor(model_file=str(model / "tokenizer.model"))
    hf_tokenizer = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
    count = library.vocab_size()
    assert len(hf_tokenizer) == count
    for kind in ("eos", "bos", "pad", "unk"):
        special = getattr(library, f"{kind}_id")()
        assert getattr(hf_tokenizer, f"{kind}_token_id") == (special if special >= 0 else None)
    lead = [library.bos_id()] * leads
    pieces = [library.id_to_piece(i).replace("\u2581", " ") for i in range(count) if not library.is_control(i)]
    for text in texts(pieces):
        expected = library.encode(text)
        assert hf_tokenizer(text, split_special_tokens=True).input_ids == lead + expected, repr(text)
        if not any(mark in text for mark in ("<s>", "</s>", "<pad>", "<unk>")):
            assert hf_tokenizer(text).input_ids == lead + expected, repr(text)
        if library.unk_id() not in expected:
            assert hf_tokenizer.decode(expected, clean_up_tokenization_spaces=False) == library.decode(expected)


@pytest.fixture(scope="module")
def init(tmp_path_factory):
    """Create a smaller model of `make quickstart` with its tool."""
    directory = tmp_path_factory.mktemp("init") / "model"
    with pytest.MonkeyPatch.context() as patch:
        options = ["--hidden", "32", "--layers", "1", "--texts", "400"]
        patch.setattr(sys, "argv", ["", str(REPOSITORY / "examples" / "brorl_tiny.toml"), str(directory), *options])
        make_tiny_model.main()
    return directory


def test_exports_of_the_quickstart_model_tokenize_exactly(init, tmp_path):
    """Test the new model, its export, and the export of its export."""
    export(init, tmp_path / "once")
    export(tmp_path / "once", tmp_path / "twice")
    for model in (init, tmp_path / "once", tmp_path / "twice"):
        assert_same(model)
    hf_tokenizer = AutoTokenizer.from_pretrained(str(tmp_path / "twice"), local_files_only=True)
    training = load_tokenizer(tmp_path / "twice")
    text, ids = render("12, 18", training, DataConfig(template="{prompt}="), 100, "here")
    assert hf_tokenizer(text).input_ids == list(ids)
    assert hf_tokenizer.decode(ids) == "12, 18="


MODELS = {
    "small": {},
    "bytes": {"byte_fallback": True},
    "as Llama's": LLAMA,
    "long runs": {"split_by_whitespace": False, "max_sentencepiece_length": 12, "byte_fallback": True},
    "sentencepiece's own rules": {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
}


@pytest.mark.parametrize(("family", "name"), [*product(["llama"], MODELS), ("qwen2", "small"), ("qwen3", "bytes")])
def test_exports_of_other_models_tokenize_exactly(tmp_path, capfd, family, name):
    model = model_around(train(tmp_path / "spm", **MODELS[name]), family, tmp_path / "in")
    (model / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 99, "legacy": True}))
    capfd.readouterr()
    exported = export(model, tmp_path / "out")
    assert capfd.readouterr().err == ""
    assert_same(exported)
    assert json.loads((exported / "tokenizer_config.json").read_text())["model_max_length"] == 99
    assert not (model / "tokenizer.json").exists()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_an_export_adds_bos_like_training(tmp_path, family):
    model = model_around(train(tmp_path / "spm", **LLAMA), family, tmp_path / "in")
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    exported = export(model, tmp_path / "out")
    assert load_tokenizer(model).encode_prompt("1") == load_tokenizer(exported).encode_prompt("1")
    assert_same(exported, leads=True)


INEXACT = {
    "unigram": ({"model_type": "unigram", "vocab_size": 80}, {}, "tokenizes '<unk>' differently"),
    "symbols": ({"user_defined_symbols": ["<x>"]}, {}, "tokenizes '<unk>' differently"),
    "added": ({}, {"added_tokens.json": {"<|im_end|>": 400}}, "with the files next to it"),
    "broken": ({}, {"special_tokens_map.json": []}, "transformers cannot convert it"),
}


@pytest.mark.parametrize(("options", "files", "reason"), INEXACT.values(), ids=INEXACT.keys())
def test_an_inexact_conversion_is_not_written(tmp_path, capfd, options, files, reason):
    model = model_around(train(tmp_path / "spm", **options), "qwen2", tmp_path / "in")
    for name, content in files.items():
        (model / name).write_text(json.dumps(content))
    capfd.readouterr()
    exported = export(model, tmp_path / "out")
    warning = capfd.readouterr().err
    assert warning.startswith(f"warning: {model / 'tokenizer.model'}: no tokenizer.json written: ")
    assert reason in warning
    assert warning.count("\n") == 1
    assert not (exported / "tokenizer.json").exists()
    for name in ("tokenizer.model", *files):
        assert (exported / name).read_bytes() == (model / name).read_bytes()


def test_a_tokenizer_class_that_transformers_overrides_is_detected(tmp_path, capfd, monkeypatch):
    """Without our class file, transformers replaces the tokenizer by its own class for Qwen2."""
    monkeypatch.setattr("megatron_brorl.data.sentencepiece._OVERRIDDEN", "none")
    exported = export(model_around(train(tmp_path / "spm"), "qwen2", tmp_path / "in"), tmp_path / "out")
    assert "no tokenizer.json written: " in capfd.readouterr().err
    assert not (exported / "tokenizer.json").exists()


def test_an_unchanged_export_is_loaded_with_sentencepiece(init, tmp_path):
    def kind(change: dict[str, Any] | None = None, file: str = "tokenizer_config.json") -> str:
        copy = shutil.copytree(init, tmp_path / "copy", dirs_exist_ok=True)
        if change:
            (copy / file).write_text(json.dumps(json.loads((copy / file).read_text()) | change))
        return type(load_tokenizer(copy)).__name__

    assert kind() == "SentencePieceTokenizer"
    assert kind({"chat_template": "{{ messages[0].content }}"}) == "HuggingFaceTokenizer"
    assert kind({"normalizer": {"type": "Lowercase"}}, "tokenizer.json") == "HuggingFaceTokenizer"


def test_a_conversion_from_megatron_exports_the_tokenizer(tmp_path):
    model = model_around(train(tmp_path / "spm", byte_fallback=True), "qwen2", tmp_path / "in")
    conversions.to_megatron(model, tmp_path / "megatron", tensor=1, pipeline=1)
    conversions.to_hf(tmp_path / "megatron", tmp_path / "out")
    assert_same(tmp_path / "out")
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 2
    assert sorted(p.name for p in (tmp_path / "megatron/hf").iterdir()) == ["config.json", "tokenizer.model"]
