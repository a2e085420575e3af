"""Data that a tokenizer cannot write down is told of at the start, with its share and an example, or refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from megatron_brorl.config.schema import DataConfig, TaskConfig
from megatron_brorl.data.round_trip import SAMPLED, sampled
from megatron_brorl.data.source import Sources, load_benchmarks, load_sources
from megatron_brorl.data.tokenizers import Tokenizer, load_tokenizer
from megatron_brorl.errors import UserError

KNOWN = "abcdefghijklmnopqrstuvwxyz0123456789+= "


def save(inner: tokenizers.Tokenizer, directory: Path) -> Tokenizer:
    inner.add_special_tokens(["</s>"])
    inner.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(directory)


@pytest.fixture
def lossy(tmp_path: Path) -> Tokenizer:
    """Neither an unknown token nor the alphabet of bytes: what has no token is left out."""
    inner = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(KNOWN)}, merges=[]))
    inner.decoder = tokenizers.decoders.Fuse()
    return save(inner, tmp_path)


def write(path: Path, rows: Sequence[tuple[str, str]]) -> str:
    path.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in rows), encoding="utf-8")
    return str(path)


def read(path: Path, rows: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> Sources:
    return load_sources(DataConfig(train=(write(path, rows),)), tokenizer, 100, 0)


def test_characters_are_lost_without_a_word(lossy):
    assert lossy.unk_id is None
    assert lossy.decode(lossy.encode("naïve café")) == "nave caf"


def test_the_share_and_one_example_are_told(lossy, tmp_path):
    rows = [(f"{i}+1=", str(i + 1)) for i in range(40)]
    rows[6], rows[30] = ("naïve café", "x"), ("1+1=", "été")
    report = read(tmp_path / "rows.jsonl", rows, lossy).report.splitlines()
    assert report == [
        f"data.train: 40 prompts from {tmp_path}/rows.jsonl",
        "warning: data.train: 2 of 40 rows looked at (5.0%) do not survive the tokenizer: "
        f"{tmp_path}/rows.jsonl:7: 'naïve café' comes back as 'nave caf'",
    ]


def test_held_out_rows_and_benchmarks_are_looked_at_too(lossy, tmp_path):
    good, bad = write(tmp_path / "good.jsonl", [("0", "2")]), write(tmp_path / "bad.jsonl", [("1", "2"), ("é1", "2")])
    config = DataConfig(train=(good,), held_out=(bad,))
    told = f"1 of 2 rows looked at (50.0%) do not survive the tokenizer: {bad}:2: 'é1' comes back as '1'"
    assert load_sources(config, lossy, 100, 0).report.splitlines()[-1] == f"warning: data.held_out: {told}"
    found, report = load_benchmarks([good, f"odd={bad}"], config, lossy, 100)
    assert {name: len(prompts) for name, prompts in found.items()} == {"good": 1, "odd": 2}
    assert report.splitlines()[-1] == f"warning: evaluate.benchmarks (odd): {told}"


def test_more_than_half_are_refused(lossy, tmp_path):
    path = tmp_path / "rows.jsonl"
    read(path, [("é1", "1"), ("1", "1")], lossy)  # half of them: told
    with pytest.raises(UserError) as caught:
        read(path, [("é1", "1"), ("1", "1"), ("x" * 50 + "ü" + "y" * 50, "1")], lossy)
    assert str(caught.value) == (
        f"data.train: 2 of 3 rows looked at (66.7%) do not survive the tokenizer: {path}:1: 'é1' comes back as '1'; "
        "more than 50%: use a tokenizer that covers the data"
    )


def test_a_long_row_is_shown_around_the_loss(lossy, tmp_path):
    rows = [("1", "1"), ("x" * 500 + "ü" + "y" * 500, "1")]
    report = read_long(tmp_path, rows, lossy)
    assert report.endswith(f":2: {'x' * 20 + 'ü' + 'y' * 19!r} comes back as {'x' * 20 + 'y' * 20!r}")


def read_long(tmp_path: Path, rows: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> str:
    config = DataConfig(train=(write(tmp_path / "rows.jsonl", rows),))
    return load_sources(config, tokenizer, 2000, 0).report


@pytest.mark.slow
def test_large_data_are_sampled_evenly_and_always_alike(lossy, tmp_path, monkeypatch):
    """Every tenth row is lost, in places that no period of the sample meets; the sample's share is near that."""
    rows = [("é" * (i % 10 == 3) + f"{i}", "1") for i in range(20_000)]
    decoded = []
    monkeypatch.setattr(type(lossy), "decode", lambda self, ids: decoded.append(ids) or "1")
    places = sampled(len(rows))
    assert (len(places), places[0], places[-1]) == (SAMPLED, 0, (SAMPLED - 1) * 20_000 // SAMPLED)
    assert {b - a for a, b in itertools.pairwise(places)} == {39, 40}
    assert sampled(3) == [0, 1, 2]
    assert sampled(0) == []
    with pytest.raises(UserError, match=f" of {SAMPLED} rows looked at"):
        read(tmp_path / "rows.jsonl", rows, lossy)
    assert len(decoded) <= 2 * SAMPLED
    monkeypatch.undo()
    told = {read(tmp_path / "rows.jsonl", rows, lossy).report.splitlines()[-1] for _ in range(2)}
    lost = sum(place % 10 == 3 for place in places)
    assert len(told) == 1
    assert f"{lost} of {SAMPLED} rows looked at ({lost / SAMPLED:.1%})" in told.pop()
    assert 0.05 < lost / SAMPLED < 0.15


def test_generated_prompts_are_looked_at(lossy):
    task = TaskConfig("chain_sum", 1.0, r"problem: (.*) =", {"min_terms": 2, "max_terms": 2, "max_digits": 1})
    words = TaskConfig("spell_backward", 2.0, r"-> nus\): (.+)", {"min_word_len": 3, "max_word_len": 4})
    sources = load_sources(DataConfig(tasks=(task, words), held_out_prompts=1), lossy, 100, 0)
    lost = [p for p in sources.train.take(0, 64) if not set(p.text + (p.answer or "")) <= set(KNOWN)]  # "-", capitals
    told = sources.report.splitlines()[-1]
    assert told.startswith(f"warning: data.tasks: {len(lost)} of 64 rows looked at (")
    assert f"item 4: {lost[0].text!r} comes back as " in told
    with pytest.raises(UserError, match=r"data\.tasks: 64 of 64 rows looked at \(100\.0%\) do not survive"):
        load_sources(DataConfig(tasks=(TaskConfig("chain_sum"),), held_out_prompts=8), lossy, 1000, 0)


def test_tokenizers_that_lose_nothing_are_not_reported(tmp_path):
    """By bytes, with NFC; and a sentencepiece model that unites white space and compatible characters."""
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    by_bytes = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    by_bytes.normalizer = normalizers.NFC()
    by_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    by_bytes.decoder = tokenizers.decoders.ByteLevel()
    (tmp_path / "spm").mkdir()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["naïve café 1 2 3"] * 9),
        model_prefix=str(tmp_path / "spm" / "tokenizer"),
        vocab_size=400,
        hard_vocab_limit=False,
        byte_fallback=True,
        minloglevel=2,
    )
    rows = [("nai\u0308ve  cafe\u0301", "①"), (" 1", "x\u00a0y"), ("</s> 🙂", "\ufb01n")]
    for tokenizer in (save(by_bytes, tmp_path), load_tokenizer(tmp_path / "spm")):
        assert read(tmp_path / "rows.jsonl", rows, tokenizer).report.count("\n") == 0
