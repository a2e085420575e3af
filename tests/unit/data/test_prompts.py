from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import sentencepiece
import tokenizers

from megatron_brorl.config.schema import DataConfig, TaskConfig
from megatron_brorl.data.prompts import Row, check_round_trip, read_rows, tokenize
from megatron_brorl.data.sentencepiece import train_sentencepiece
from megatron_brorl.data.source import load_benchmarks, load_sources
from megatron_brorl.data.tokenizers import Tokenizer, load_tokenizer
from megatron_brorl.errors import UserError

GOOD = b'{"prompt": "1+1", "answer": "2"}'
ENTRY = {"question": "1+1", "answer": "2", "metadata": {"source_dataset": "chain_sum"}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    texts = [f"{a}+{b}={a + b}" for a in range(20) for b in range(20)]
    return train_sentencepiece([*texts, "Q: A:\n"], tmp_path_factory.mktemp("tokenizer"), 64)


def write(path: Path, *lines: bytes, end: bytes = b"\n") -> Path:
    path.write_bytes(end.join(lines) + end)
    return path


def test_a_row_with_all_keys(tmp_path: Path) -> None:
    row = {
        "prompt": "1+1",
        "answer": None,
        "verifier": "reasoning_gym",
        "id": "a",
        "metadata": {"source_dataset": "chain_sum", "entry": ENTRY},
    }
    path = write(tmp_path / "f.jsonl", json.dumps(row).encode(), GOOD)
    assert read_rows(path) == [
        Row(f"{path}:1", "1+1", None, "reasoning_gym", "a", row["metadata"]),  # type: ignore[arg-type]
        Row(f"{path}:2", "1+1", "2", "exact", "f.jsonl:2", {}),
    ]


def test_numbers_are_answers_and_ids(tmp_path: Path) -> None:
    for value, text in (("-7", "-7"), ("3.0", "3"), ("0.25", "0.25"), ("1e3", "1000"), ("0", "0")):
        path = write(tmp_path / "f.jsonl", f'{{"prompt": "x", "answer": {value}, "id": {value}}}'.encode())
        assert [(row.answer, row.id) for row in read_rows(path)] == [(text, text)]


BAD: dict[str, tuple[bytes, str]] = {
    "broken": (b'{"prompt": "x"', "not valid JSON: Expecting"),
    "list": (b"[1]", "a row must be an object"),
    "no prompt": (b'{"answer": "2"}', "prompt must be a string that is not empty, there is none"),
    "bool as answer": (b'{"prompt": "x", "answer": true}', "answer must be a string, not true"),
    "list as answer": (b'{"prompt": "x", "answer": [42]}', "answer must be a string, not [42]"),
    "infinity": (b'{"prompt": "x", "answer": "1", "metadata": {"a": [Infinity]}}', "NaN or infinite"),
    "deep": (b"[" * 100_000, "not valid JSON"),
    "latin-1": (
        '{"prompt": "caf\xe9", "answer": "1"}'.encode("latin-1"),
        "byte 0xe9 is not UTF-8; save the file as UTF-8",
    ),
    "half a surrogate": (b'{"prompt": "\\ud800", "answer": "1"}', "prompt has half of a surrogate pair"),
    "no answer": (b'{"prompt": "x"}', 'verifier "exact" needs a reference'),
    "misspelt": (b'{"prompt": "x", "anwser": "1"}', "unknown key 'anwser'; known: prompt, answer"),
    "unknown verifier": (b'{"prompt": "x", "verifier": "maths"}', "no verifier is called 'maths'; did you mean math?"),
    "taken id": (b'{"prompt": "x", "answer": "1", "id": "first"}', "id 'first' is taken by"),
    "metadata type": (b'{"prompt": "x", "answer": "1", "metadata": "m"}', 'metadata must be an object, not "m"'),
    "no entry": (
        json.dumps({"prompt": "x", "verifier": "reasoning_gym", "metadata": {"source_dataset": "gcd"}}).encode(),
        "needs metadata.entry",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_malformed_row_is_named(tmp_path: Path, kind: str) -> None:
    line, message = BAD[kind]
    first = b'{"prompt": "x", "answer": "1", "id": "first"}'
    path = write(tmp_path / "f.jsonl", first, b"", line, GOOD)
    with pytest.raises(UserError) as e:
        read_rows(path)
    assert str(e.value).startswith(f"{path}:3: ")
    assert message in str(e.value)
    assert "\n" not in str(e.value)
    assert len(str(e.value)) < 400


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"answer": float("nan")}, "answer must be a string, not nan"),
        ({"answer": "2", "metadata": {"a": float("nan")}}, "NaN or infinite"),
        ({"answer": "2", "metadata": "{"}, "not valid JSON"),
        ({"answer": "2", "data_source": "x"}, "unknown key 'data_source'"),
    ],
)
def test_a_malformed_row_of_parquet_is_named(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    path = tmp_path / "f.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "1+1", **columns}]), path)
    with pytest.raises(UserError) as e:
        read_rows(path)
    assert str(e.value).startswith(f"{path}:1: ")
    assert message in str(e.value)


def row(prompt: str) -> Row:
    return Row("f.jsonl:7", prompt, "2", "exact", "id", {"a": 1})


def test_tokenize_applies_the_template(tokenizer: Tokenizer) -> None:
    config = DataConfig(template="Q: {prompt}\nA:")
    (prompt,) = tokenize([row("1+{prompt}".replace("{prompt}", "1"))], tokenizer, config, 100)
    assert prompt.text == "Q: 1+1\nA:"
    assert prompt.token_ids == tuple(tokenizer.encode("Q: 1+1\nA:"))
    assert (prompt.id, prompt.answer, prompt.verifier, prompt.metadata) == ("id", "2", "exact", {"a": 1})


def test_prompts_that_do_not_fit_are_errors(tokenizer: Tokenizer) -> None:
    length = len(tokenizer.encode("12+34"))
    assert len(tokenize([row("12+34")], tokenizer, DataConfig(), length)) == 1
    message = rf"^f\.jsonl:7: the prompt has {length} tokens, but at most {length - 1} .*raise model\.context"
    with pytest.raises(UserError, match=message):
        tokenize([row("12+34")], tokenizer, DataConfig(), length - 1)
    with pytest.raises(UserError, match=r"^f\.jsonl:7: the prompt has characters that the tokenizer does not know"):
        tokenize([row("1+ü")], tokenizer, DataConfig(), 100)
    with pytest.raises(UserError, match="no chat template"):
        tokenize([row("1+1")], tokenizer, DataConfig(chat=True), 100)


@pytest.fixture
def lossy(tmp_path: Path) -> Tokenizer:
    """A tokenizer with neither an unknown token nor bytes, which drops other characters."""
    known = "abcdefghijklmnopqrstuvwxyz0123456789+= "
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(known)}, merges=[]))
    inner.decoder = tokenizers.decoders.Fuse()
    inner.add_special_tokens(["</s>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(tmp_path)


def test_text_that_a_tokenizer_loses_is_reported(tmp_path: Path, lossy: Tokenizer) -> None:
    """Test training, held-out and benchmark files, and generated prompts."""
    good = write(tmp_path / "good.jsonl", *[GOOD] * 30, '{"prompt": "naïve café", "answer": "x"}'.encode())
    bad = write(tmp_path / "bad.jsonl", GOOD, ('{"prompt": "1", "answer": "' + "x" * 50 + 'é1"}').encode())
    config = DataConfig(train=(str(good),), held_out=(str(bad),))
    report = load_sources(config, lossy, 100, 0).report.splitlines()
    assert report[1] == (
        "warning: data.train: 1 of 31 checked rows (3.2%) do not survive the tokenizer: "
        f"{good}:31: 'naïve café' comes back as 'nave caf'"
    )
    told = (
        "1 of 2 checked rows (50.0%) do not survive the tokenizer: "
        f"{bad}:2: {'x' * 20 + 'é1'!r} comes back as {'x' * 20 + '1'!r}"
    )
    assert report[3] == f"warning: data.held_out: {told}"
    benchmark = load_benchmarks([f"odd={bad}"], config, lossy, 100)[1]
    assert benchmark.endswith(f"warning: evaluate.benchmarks (odd): {told}")

    worse = write(tmp_path / "worse.jsonl", '{"prompt": "é1", "answer": "1"}'.encode())
    with pytest.raises(UserError, match=r"data\.train: 1 of 1 checked rows .* use a tokenizer that covers"):
        load_sources(DataConfig(train=(str(worse),)), lossy, 100, 0)

    words = TaskConfig("spell_backward", 2.0, r"-> nus\): (.+)", {"min_word_len": 3, "max_word_len": 4})
    sums = TaskConfig("chain_sum", 1.0, r"problem: (.*) =", {"min_terms": 2, "max_terms": 2, "max_digits": 1})
    generated = load_sources(DataConfig(tasks=(sums, words), held_out_prompts=1), lossy, 100, 0).report
    assert "warning: data.tasks: " in generated


def test_compatible_characters_and_white_space_are_no_loss(tmp_path: Path) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["naïve café 1 2 3"] * 9),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=400,
        hard_vocab_limit=False,
        byte_fallback=True,
        minloglevel=2,
    )
    texts = ("nai\u0308ve  cafe\u0301", "①", " 1", "x\u00a0y", "</s> 🙂", "\ufb01n")
    assert check_round_trip([("f:1", texts)], load_tokenizer(tmp_path), "data.train") == []
