from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from tiny_tokenizer import train_sentencepiece
from unit.data.test_tokenizers import make_pieces

from megatron_brorl.config.schema import DataConfig, TaskConfig
from megatron_brorl.data.prompts import Row, check_round_trip, read_rows, tokenize
from megatron_brorl.data.source import load_benchmarks, load_sources
from megatron_brorl.data.tokenizers import load_tokenizer
from megatron_brorl.errors import UserError

GOOD = b'{"prompt": "1+1", "answer": "2"}'
ENTRY = {"question": "1+1", "answer": "2", "metadata": {"source_dataset": "chain_sum"}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    texts = [f"{a}+{b}={a + b}" for a in range(20) for b in range(20)]
    return train_sentencepiece([*texts, "Q: A:\n"], tmp_path_factory.mktemp("tokenizer"), 64)


def write(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def test_a_row_with_all_keys(tmp_path):
    metadata = {"source_dataset": "chain_sum", "entry": ENTRY}
    row = {"prompt": "1+1", "answer": None, "verifier": "reasoning_gym", "id": "a", "metadata": metadata}
    path = write(tmp_path / "f.jsonl", json.dumps(row).encode(), GOOD)
    assert read_rows(path) == [
        Row(f"{path}:1", "1+1", None, "reasoning_gym", "a", metadata),
        Row(f"{path}:2", "1+1", "2", "exact", "f.jsonl:2", {}),
    ]


def test_numbers_are_answers_and_ids(tmp_path):
    for value, text in (("-7", "-7"), ("3.0", "3"), ("0.25", "0.25"), ("1e3", "1000"), ("0", "0")):
        path = write(tmp_path / "f.jsonl", f'{{"prompt": "x", "answer": {value}, "id": {value}}}'.encode())
        assert [(row.answer, row.id) for row in read_rows(path)] == [(text, text)]


USER, TURN = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}
SYSTEM, HALF = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "\ud800"}
MESSAGES: list[tuple[list[dict[str, Any]], str]] = [
    ([], "prompt must be a string or a list with a message of the user"),
    ([{"role": "user", "content": 3}], "prompt[0] must be"),
    ([{"role": "human", "content": "x"}], "prompt[0]: unknown role 'human'"),
    ([USER, SYSTEM, USER], "prompt[1]: a system message may only come first"),
    ([USER, TURN, TURN], "prompt[1] and later: after the last"),
    ([USER, TURN, {"role": "tool", "content": "5"}], "the last one must be the assistant's"),
    ([USER, {"role": "assistant", "tool_calls": 1}], "prompt[1].tool_calls must be a list of"),
    ([HALF], "prompt has half of a surrogate pair"),
    ([USER, TURN, {**HALF, "role": "tool"}, TURN], "messages has half of a"),
]
BAD: list[tuple[bytes, str]] = [
    *((json.dumps({"prompt": prompt, "answer": "20"}).encode(), named) for prompt, named in MESSAGES),
    (b'{"prompt": "x"', "not valid JSON"),
    (b"[" * 100_000, "not valid JSON"),
    ('{"prompt": "caf\xe9", "answer": "1"}'.encode("latin-1"), "byte 0xe9 is not UTF-8; save the file as UTF-8"),
    (b"[1]", "a row must be an object"),
    (b'{"answer": "2"}', "prompt must be a string"),
    (b'{"prompt": "\\ud800", "answer": "1"}', "prompt has half of a surrogate pair"),
    (b'{"prompt": "x", "answer": true}', "answer must be a string, not true"),
    (b'{"prompt": "x", "answer": "1", "metadata": {"a": [Infinity]}}', "NaN or infinite"),
    (b'{"prompt": "x", "answer": "1", "metadata": "m"}', 'metadata must be an object, not "m"'),
    (b'{"prompt": "x"}', 'verifier "exact" needs a reference'),
    (b'{"prompt": "x", "anwser": "1"}', "unknown key 'anwser'; known: prompt, answer"),
    (b'{"prompt": "x", "verifier": "maths"}', "'maths'; did you mean math?"),
    (b'{"prompt": "x", "verifier": "reasoning_gym", "metadata": {"source_dataset": "gcd"}}', "needs metadata.entry"),
]
PARQUET: list[tuple[dict[str, Any], str]] = [
    ({"answer": float("nan")}, "answer must be a string, not nan"),
    ({"answer": "2", "metadata": "{"}, "not valid JSON"),
    ({"answer": "2", "data_source": "x"}, "unknown key 'data_source'"),
]


@pytest.mark.parametrize(("row", "named"), [*BAD, *PARQUET])
def test_a_malformed_row_is_named(tmp_path, row, named):
    if isinstance(row, bytes):
        first = b'{"prompt": "x", "answer": "1", "id": "first"}'
        path = write(tmp_path / "f.jsonl", first, b"", row, GOOD)
    else:
        path = tmp_path / "f.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "1+1", **row}]), path)
    with pytest.raises(UserError) as error:
        read_rows(path)
    assert str(error.value).startswith(f"{path}:{3 if isinstance(row, bytes) else 1}: ")
    assert named in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def row(prompt: str) -> Row:
    return Row("f.jsonl:7", prompt, "2", "exact", "id", {"a": 1})


def test_prompts_that_cannot_be_used_are_errors(tokenizer):
    length = len(tokenizer.encode("12+34"))
    assert len(tokenize([row("12+34")], tokenizer, DataConfig(), length)) == 1
    for text, config, limit, named in (
        ("12+34", DataConfig(), length - 1, rf"{length} tokens, but at most {length - 1} .*raise model\.context"),
        ("1+ü", DataConfig(), 100, "characters that the tokenizer does not know"),
        ("1+1", DataConfig(chat=True), 100, "no chat template"),
    ):
        with pytest.raises(UserError, match=rf"^f\.jsonl:7: .*{named}"):
            tokenize([row(text)], tokenizer, config, limit)


@pytest.fixture
def lossy(tmp_path):
    """A tokenizer with neither an unknown token nor bytes, which drops other characters."""
    alphabet = "abcdefghijklmnopqrstuvwxyz0123456789+= "
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    inner.decoder = tokenizers.decoders.Fuse()
    inner.add_special_tokens(["</s>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(tmp_path)


def test_text_that_a_tokenizer_loses_is_reported(tmp_path, lossy):
    """Test training, held-out and benchmark files, and generated prompts."""
    good = write(tmp_path / "good.jsonl", *[GOOD] * 30, '{"prompt": "naïve café", "answer": "x"}'.encode())
    bad = write(tmp_path / "bad.jsonl", GOOD, ('{"prompt": "1", "answer": "' + "x" * 50 + 'é1"}').encode())
    config = DataConfig(train=(str(good),), held_out=(str(bad),))
    report = load_sources(config, lossy, 100, 0).report.splitlines()
    share = "1 of 31 checked rows (3.2%) do not survive the tokenizer"
    assert report[1] == f"warning: data.train: {share}: {good}:31: 'naïve café' comes back as 'nave caf'"
    text = "x" * 20
    loss = f"1 of 2 checked rows (50.0%) do not survive the tokenizer: {bad}:2: '{text}é1' comes back as '{text}1'"
    assert report[3] == f"warning: data.held_out: {loss}"
    benchmark = load_benchmarks([f"odd={bad}"], config, lossy, 100)[1]
    assert benchmark.endswith(f"warning: evaluate.benchmarks (odd): {loss}")

    worse = write(tmp_path / "worse.jsonl", '{"prompt": "é1", "answer": "1"}'.encode())
    with pytest.raises(UserError, match=r"data\.train: 1 of 1 checked rows .* use a tokenizer"):
        load_sources(DataConfig(train=(str(worse),)), lossy, 100, 0)

    words = TaskConfig("spell_backward", 2.0, r"-> nus\): (.+)", {"min_word_len": 3, "max_word_len": 4})
    sums = TaskConfig("chain_sum", 1.0, r"problem: (.*) =", {"min_terms": 2, "max_terms": 2, "max_digits": 1})
    generated = load_sources(DataConfig(tasks=(sums, words), held_out_prompts=1), lossy, 100, 0).report
    assert "warning: data.tasks: " in generated


def test_compatible_characters_and_white_space_are_no_loss(tmp_path):
    tokenizer = load_tokenizer(make_pieces(tmp_path, ["naïve café 1 2 3"] * 9, byte_fallback=True))
    texts = ("nai\u0308ve  cafe\u0301", "①", " 1", "x\u00a0y", "</s> 🙂", "\ufb01n")
    assert check_round_trip([("f:1", texts)], tokenizer, "data.train") == []
