"""The rollout benchmark runs, counts the requested tokens, and finds one copy of the prompt's keys and values."""

from __future__ import annotations

import json
import sys

import bench_common
import bench_rollout
import measure
import pytest

from megatron_brorl.families.shape import parse_shape

T4_MATRICES = 4 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 688 * 256) + 4096 * 256  # layers: q and o, k and v, MLP; head


@pytest.mark.slow
def test_rows(monkeypatch, tmp_path):
    out = tmp_path / "rows.json"
    peak = 1e11
    monkeypatch.setattr(bench_rollout, "peak_flops", lambda *_: peak)
    options = "--models t4 --n 6 --prompts 16 --lengths 2-7 --threads 1 --repeat 1 --json"
    monkeypatch.setattr(sys, "argv", ["bench_rollout.py", *options.split(), str(out)])
    bench_rollout.main()
    rows = json.loads(out.read_text())
    engines = [(row["engine"], row["lengths"], row["tokens"]) for row in rows]
    assert engines == [(name, "2-7", 2 + 3 + 4 + 5 + 6 + 7) for name in ("brorl", "transformers")]
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["seconds"])
        assert row["fma_peak_share"] == pytest.approx(2 * T4_MATRICES * row["tokens_per_s"] / peak)
        assert row["peak_mib"] > 4 * T4_MATRICES / 2**20  # at least the weights in float32
    # Of engine brorl: prompt tokens x layers x (keys and values) x (heads x size) x bytes.
    assert rows[0]["prompt_kv_bytes"] == 16 * 4 * 2 * (2 * 64) * 4
    assert rows[0]["prompt_kv_copies"] == 1


def test_lengths():
    spread = bench_rollout.sibling_lengths("8-256", 512)
    assert min(spread) == 8
    assert max(spread) == 256
    assert sum(spread) == 512 * (8 + 256) / 2
    assert spread != sorted(spread)
    assert bench_rollout.sibling_lengths("64", 3) == [64] * 3


def test_matrix_weights_are_those_of_transformers():
    """Compare with the matrices of transformers' model, in which the head and the embedding are one parameter."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = bench_common.MODELS["t4"]
    model = Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in config.items() if k != "dtype"}))
    expected = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert bench_common.matrix_weights(parse_shape(config, where="")) == expected


def test_an_engine_with_wrong_lengths_is_refused():
    job = {"prompts": [[1], [2]], "lengths": [2, 3]}
    with pytest.raises(RuntimeError, match="other lengths"):
        measure.time_rollouts(job, lambda prompt, lengths, seed: [[0, 0], [1, 1]])
    with pytest.raises(RuntimeError, match="did not sample"):
        measure.time_rollouts({**job, "lengths": [2, 2]}, lambda prompt, lengths, seed: [[0, 0], [0, 0]])


@pytest.mark.slow
def test_the_output_of_a_failed_engine_is_reported(monkeypatch):
    monkeypatch.setattr(bench_rollout, "peak_flops", lambda *_: 1e11)
    options = "--models t4 --n 2 --prompts 2 --lengths 2 --engines brorl --repeat 1 --vllm-python"
    monkeypatch.setattr(sys, "argv", ["bench_rollout.py", *options.split(), sys.executable])
    with pytest.raises(SystemExit, match=r"engine_vllm\.py .* failed"):
        bench_rollout.main()
