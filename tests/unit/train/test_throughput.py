"""Metrics over ranks: computed by hand, and those of a real step against known values."""

from __future__ import annotations

import json
from types import SimpleNamespace

import fakes
import metric_faults
import numpy as np
import pytest
import torch
from dist.steps import configured, make_trainer

from megatron_brorl.families.shape import read_shape
from megatron_brorl.parallel.flops import forward_flops, peak_of, training_flops
from megatron_brorl.parallel.packing import pack
from megatron_brorl.tracking.progress import progress
from megatron_brorl.tracking.timeline import Span, Timeline
from megatron_brorl.train import throughput
from megatron_brorl.train.console import console_line

# Seconds and counts of four ranks; the second rank is the slow one.
RANKS = {
    "generate": [6.0, 10.0, 8.0, 8.0],
    "score": [0.0, 0.0, 0.0, 0.0],
    "exchange": [1.0, 1.0, 1.0, 1.0],
    "train": [20.0, 40.0, 30.0, 30.0],
    "weight_sync": [2.0, 2.0, 2.0, 2.0],
    "sampled_tokens": [1000.0, 3000.0, 2000.0, 2000.0],
    "forward_s": [5.0, 5.0, 5.0, 4.0],
    "forward_flops": [1e12, 1e12, 1e12, 1e12],
    "update_s": [40.0, 40.0, 39.0, 40.0],
    "update_flops": [8e12, 8e12, 4e12, 4e12],
    "kv_peak": [0.5, 0.75, 0.0, 0.25],
    "kv_sum": [10.0, 30.0, 0.0, 5.0],
    "kv_turns": [40.0, 60.0, 0.0, 20.0],
    "prompt_tokens": [160.0, 100.0, 0.0, 60.0],
    "prompt_found": [150.0, 60.0, 0.0, 30.0],
    "wall_train": [50.0, 50.0, 50.0, 50.0],
    "wall_step": [80.0, 80.0, 80.0, 80.0],
}
PROMPTS = {"prompt_tokens": 16.0, "prompt_found": 12.0}  # counts of one call of generate
COLUMNS = {name: np.array(values) for name, values in RANKS.items()}


def test_waiting_times_of_ranks():
    figures = throughput.waiting(COLUMNS)
    assert figures["ranks/train_slowest"] == 40.0
    assert figures["ranks/train_mean"] == 30.0
    assert figures["ranks/train_fastest"] == 20.0
    assert figures["ranks/train_idle"] == 0.25
    assert figures["ranks/generate_idle"] == pytest.approx(0.2)
    assert figures["ranks/weight_sync_idle"] == 0.0
    assert figures["ranks/idle"] == pytest.approx((2.0 + 10.0) / 80.0)  # 10 - 8 s of generate, 40 - 30 s of train
    assert not any("score" in name for name in figures)  # there was none


def test_throughput_per_device():
    figures = throughput.throughput(COLUMNS, trained_tokens=4000.0, peak=1e12)
    assert figures["throughput/tokens_per_s"] == 8000 / 80 / 4
    assert figures["throughput/generate_tokens_per_s"] == 8000 / 10 / 4
    assert figures["throughput/train_tokens_per_s"] == 4000 / 50 / 4
    assert figures["throughput/update_tflops"] == pytest.approx(24 / 40 / 4)
    assert figures["throughput/update_mfu"] == pytest.approx(24 / 40 / 4)  # the peak is one TFLOP/s
    assert figures["throughput/forward_mfu"] == pytest.approx(4 / 5 / 4)
    assert figures["throughput/mfu"] == pytest.approx(28 / 80 / 4)
    unknown = throughput.throughput(COLUMNS, trained_tokens=4000.0, peak=None)
    assert unknown == {name: value for name, value in figures.items() if "mfu" not in name}


def test_seconds_of_a_rank_exclude_waiting():
    spans = [
        Span("generate", 0.0, 3.0, {"tokens": 50.0, "kv_peak": 0.5, "kv_mean": 0.25, "kv_turns": 10.0, **PROMPTS}),
        Span("generate", 3.0, 4.0, {"tokens": 30.0, "kv_peak": 0.25, "kv_mean": 0.125, "kv_turns": 40.0, **PROMPTS}),
        Span("forward", 4.0, 6.0, {"flops": 7.0}),
        Span("reduce gradients", 8.0, 11.0, {}),
        Span("optimizer step", 6.0, 12.0, {"flops": 21.0}),
    ]
    values = throughput.rank_values(Timeline(spans=spans))
    expected = {"generate": 4.0, "sampled_tokens": 80.0, "train": 2.0 + 6.0 - 3.0, "update_s": 6.0}
    expected |= {"update_flops": 21.0, "forward_s": 2.0, "forward_flops": 7.0, "kv_peak": 0.5}
    expected |= {"kv_sum": 0.25 * 10 + 0.125 * 40, "kv_turns": 50.0, "prompt_tokens": 32.0, "prompt_found": 24.0}
    assert {name: values[name] for name in expected} == expected


def test_run_logs_metrics_and_traces_every_second_step(processes, model, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_brorl.train.trainer.peak_flops", lambda: 1e12)
    changes = {
        "run": {"dir": str(tmp_path), "trace_every": 2},
        "rollout": {"n": 16, "prompts": 2},
        "train": {"steps": 3},
        "algo": {"mini_batches": 2},
    }
    rows = []
    writer = SimpleNamespace(write=lambda step, metrics, seconds: rows.append((step, metrics, seconds)))
    trainer = make_trainer(model[0], processes, configured(changes), fakes.Engine())
    trainer.held_out = []
    trainer.save = lambda *_, **__: None
    with progress(3, "train", enabled=False) as display:
        trainer.run(writer, display, lambda: False)

    # A single rank never waits, and the numbers of sampled and trained tokens are known.
    for _, metrics, seconds in rows:
        assert metric_faults.of_row({**metrics, "time": seconds}) == []
        assert seconds["ranks/idle"] == 0.0
        assert seconds["ranks/step_slowest"] == seconds["step"]
        sampled = metrics["response_tokens"] * metrics["rollouts"]
        assert seconds["throughput/tokens_per_s"] * seconds["step"] == pytest.approx(sampled)
        assert seconds["throughput/train_tokens_per_s"] * seconds["train"] == pytest.approx(metrics["trained_tokens"])
        assert seconds["throughput/update_mfu"] == pytest.approx(seconds["throughput/update_tflops"])
        assert 0 < seconds["ranks/train_slowest"] <= seconds["train"]
        assert "kv_cache/peak" not in seconds  # the fake engine does not report it
        assert {"tok/s/device", "MFU"} <= console_line(metrics, seconds).keys()

    # A trace of steps 0 and 2 as metrics.jsonl counts them, inner spans within the outer ones.
    assert [step for step, _, _ in rows] == [0, 1, 2]
    trace_0, trace_2 = sorted((tmp_path / "traces").iterdir())
    assert (trace_0.name, trace_2.name) == ("step_000000.json", "step_000002.json")
    events = [e for e in json.loads(trace_2.read_text())["traceEvents"] if e["ph"] == "X"]
    times = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events}
    for inner, outer in [
        ("generate", "round"),
        ("score", "round"),
        ("round", "collect"),
        ("exchange", "collect"),
        ("forward", "experience"),
        ("reduce gradients", "optimizer step"),
        ("optimizer step", "update"),
    ]:
        assert times[outer][0] <= times[inner][0] <= times[inner][1] <= times[outer][1]
    assert sum(e["name"] == "optimizer step" for e in events) == 2
    (generate,) = (e for e in events if e["name"] == "generate")
    assert generate["args"]["tokens"] == sampled  # of step 2, the last row above
    assert times["weight_sync"][0] >= times["update"][1]
    assert min(begin for begin, _ in times.values()) >= 0


def test_a_trace_that_cannot_be_written_does_not_end_the_run(processes, tmp_path, capfd):
    (tmp_path / "traces").write_text("a file where the folder should be")
    throughput.write_trace(tmp_path / "traces" / "step_000001.json", Timeline(), rank=0, origin=0.0)
    assert "this trace is missing" in capfd.readouterr().err


def test_flops_equal_a_count_by_hand(model):
    """Count the weights of the model and the pairs of a mask built token by token."""
    shape = read_shape(model[0])
    g = torch.Generator().manual_seed(0)
    prompts = [torch.arange(9)] * 4 + [torch.arange(5)] * 3
    responses = [torch.randint(0, 50, (n,), generator=g) for n in (3, 7, 1, 12, 4, 4, 9)]
    matrices = sum(p.numel() for name, p in model[1].named_parameters() if p.ndim == 2 and "embed" not in name)
    head = shape.vocab * shape.hidden
    assert matrices == 4 * (48 * 48 * 2 + 48 * 24 * 2 + 3 * 48 * 88)  # tied: the head is the embedding
    for share in (False, True):
        batches = pack(prompts, responses, 1000, share=share)
        tokens = sum(len(b.input_ids) for b in batches)
        prompt_tokens = 9 + 5 if share else 4 * 9 + 3 * 5
        assert tokens == prompt_tokens + sum(len(r) - 1 for r in responses)
        spans = [(len(p), len(p) + len(r) - 1) for p, r in zip(prompts, responses, strict=True)]
        pairs = sum(i + 1 for begin, end in spans for i in range(begin if share else 0, end))
        pairs += sum(i + 1 for n in (9, 5) for i in range(n)) if share else 0  # of each prompt once
        attention = pairs * 4 * 2 * 2 * 48  # 4 layers, 2 products of 2 operations over 48 query components
        expected = 2 * matrices * tokens + 2 * head * sum(map(len, responses)) + attention
        assert forward_flops(shape, batches, shape.vocab) == expected
        assert training_flops(shape, batches, shape.vocab) == 3 * expected
        # With 1,000 weights of adapters, all other matrices have only the gradient of their input.
        frozen = 2 * (expected - attention) + 3 * (attention + 2 * 1000 * tokens)
        assert training_flops(shape, batches, shape.vocab, adapters=1000) == frozen
    assert forward_flops(shape, pack([], [], 1000, multiple_of=8), shape.vocab) == 0.0
    assert peak_of("NVIDIA H100 80GB HBM3") == 989.4e12
    assert peak_of("NVIDIA H100 PCIe") == 756.5e12
    assert peak_of("NVIDIA GB200") == 2500e12
    assert peak_of("Some new GPU") is None
