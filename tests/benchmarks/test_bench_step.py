"""The step benchmark trains through the command line; both sides get the same prompts and rewards."""

from __future__ import annotations

import json
import sys

import bench_common
import bench_step
import pytest

from megatron_brorl.data.tokenizers import load_tokenizer

T4_WEIGHTS = 4 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 688 * 256) + 4096 * 256  # layers: q and o, k and v, MLP; head


@pytest.mark.slow
def test_rows(monkeypatch, tmp_path):
    out = tmp_path / "rows.json"
    peak = 1e11
    monkeypatch.setattr(bench_step, "peak_flops", lambda *_: peak)
    options = "--n 16 --prompts 8 --response 16 --threads 1 --repeat 1 --json"
    monkeypatch.setattr(sys, "argv", ["bench_step.py", *options.split(), str(out)])
    bench_step.main()
    (row,) = json.loads(out.read_text())
    assert row["engine"] == "brorl"
    assert set(row["seconds"]) == {"generate", "score", "train", "weight_sync", "step"}
    assert sum(row["seconds"].values()) <= 2.01 * row["seconds"]["step"]  # the step and its phases
    assert 16 * 15 <= row["tokens"] <= 16 * 16  # few responses end before the limit
    assert row["samples_per_s"] == pytest.approx(16 / row["seconds"]["step"])
    assert row["fma_peak_share"] == pytest.approx(8 * T4_WEIGHTS * row["tokens_per_s"] / peak)  # sample: 2, train: 6


def test_prompts_have_the_requested_tokens(tmp_path):
    vocab = bench_common.MODELS["t4"]["vocab_size"]
    bench_common.write_model("t4", tmp_path)  # load_tokenizer reads its config.json
    bench_step.write_tokenizer(vocab, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == vocab
    for row in bench_step.questions(vocab, tokens=64, count=3):
        assert len(tokenizer.encode_prompt(row["prompt"])) == 64
    text = "<answer>1</answer>1<w500>"
    assert len(tokenizer.encode(text)) == 2
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_step_without_a_signal_is_refused():
    result = {"steps": [{"reward": 0.5}, {"reward": 0.0}]}
    with pytest.raises(bench_step.EngineFailed, match="nothing to train on"):
        bench_step.row("brorl", result, {"n": 2, "response": 1}, prompt=1, weights=1)
