"""Tests of whole runs: their outputs, evaluation, exported models, and distillation."""

from __future__ import annotations

import json
import math
import re
import shutil
import time

import metric_faults
import pytest
import torch
import yaml
from e2e.runs import brorl, metric_lines, rewind, train
from random_model import qwen2_config, write_random_model
from safetensors.torch import load_file
from sentencepiece import SentencePieceProcessor
from tiny_tokenizer import train_sentencepiece
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_brorl.rollout_log import FOLDER, LogEntry, entries, read_groups, read_rollouts


def test_supervised_training_lowers_the_loss(warm):
    losses = [row["loss"] for row in metric_lines(warm.parent)]
    assert len(losses) == 60
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_a_run_writes_metrics_rollouts_model_and_summary(finished, warm):
    directory, result = finished
    lines = metric_lines(directory)
    assert [line["step"] for line in lines] == list(range(8))
    assert all(line["rollouts"] == 6 * 32 for line in lines)
    assert sum(line["updates"] for line in lines) >= 8
    assert all(line["logprob_gap_max"] <= 1e-4 for line in lines)
    assert all(any(name.startswith("theory_") for name in line) for line in lines)
    assert not any("reshard_gap_max" in line for line in lines)  # train.verify_weights is not "always"
    assert [line["step"] for line in lines if "pass_at_1" in line] == [3]
    summary = json.loads((directory / "summary.json").read_text())
    assert metric_faults.of_summary(summary) == []
    for when in ("before", "after"):
        pass_at_1, pass_at_2 = summary[f"pass_at_1_{when}"], summary[f"pass_at_2_{when}"]
        assert 0 <= pass_at_1["low"] <= pass_at_1["mean"] <= pass_at_1["high"] <= 1
        assert pass_at_2 == summary[when]["pass_at_k"]["2"] >= pass_at_1["mean"]
        assert f"held-out {when}: pass@1 {100 * pass_at_1['mean']:.1f}%" in result.stderr
        (line,) = (line for line in result.stdout.splitlines() if line.startswith(f"pass@1 {when}"))
        assert line.endswith(f"pass@2  {pass_at_2:.4f}")
    assert "6 prompts x 32 rollouts = 192 -> 2 optimizer steps" in result.stderr
    assert set(summary["findings"]) <= {"task never right"}  # this model never learns to reverse words
    assert (summary["held_out_prompts"], summary["rollouts_per_prompt"], summary["steps"]) == (24, 32, 8)
    assert summary["job_seconds"] > 0
    assert summary["peak_rss_mib"] > 100
    assert (directory / "curves.png").stat().st_size > 10_000
    assert list((directory / "tensorboard").glob("events.*"))
    assert (directory / "checkpoints" / "latest").read_text().strip() == "step_00000008"

    # The rollout log has every step and all three evaluations; the console shows three samples of each evaluation.
    log_entries = entries(directory / "rollouts")
    assert [entry.number for entry in log_entries if entry.kind == "step"] == list(range(8))
    assert [entry.number for entry in log_entries if entry.kind == "evaluation"] == [0, 4, 8]
    for line in lines:
        groups = read_groups(directory / "rollouts", LogEntry("step", line["step"])).to_pylist()
        assert sum(g["right"] for g in groups) / (6 * 32) == pytest.approx(line["reward"])
        assert sum(g["trained"] for g in groups) / 6 == pytest.approx(line["kept_share"])
        assert sum(g["recorded"] for g in groups) == 4 * 32  # run.record_groups is 4
    groups = read_groups(directory / "rollouts", LogEntry("evaluation", 8)).to_pylist()
    assert sum(g["right"] for g in groups) / (24 * 2) == pytest.approx(summary["pass_at_1_after"]["mean"])
    assert len(read_rollouts(directory / "rollouts", LogEntry("evaluation", 8))) == 24 * 2
    assert result.stderr.count("held-out sample") == 3 * 3

    # The console shows the numbers of metrics.jsonl.
    matches = [re.match(r"train (\d)/8 .* reward ([\d.]+)", line) for line in result.stderr.splitlines()]
    assert [(int(m[1]), m[2]) for m in matches if m] == [(line["step"] + 1, f"{line['reward']:.3f}") for line in lines]

    # The exported model is a trained one, with the tokenizer of the base model.
    trained = AutoModelForCausalLM.from_pretrained(directory / "model")
    before = load_file(warm / "model.safetensors")
    assert any(not torch.equal(p, before[n]) for n, p in trained.named_parameters() if n in before)
    assert (directory / "model" / "tokenizer.model").read_bytes() == (warm / "tokenizer.model").read_bytes()
    exported = AutoTokenizer.from_pretrained(directory / "model")
    library = SentencePieceProcessor(model_file=str(warm / "tokenizer.model"))
    assert exported("12, 18=").input_ids == library.encode("12, 18=")
    assert trained.generation_config.eos_token_id == library.eos_id()


def test_early_stopping_and_the_model_card(config, warm, tmp_path):
    """With a learning rate of 0, patience ends the run. Another start adds no step and writes the same card."""
    base = shutil.copytree(warm, tmp_path / "small")
    (base / "README.md").write_text("---\nlicense: llama3\nbase_model: them/large\n---\n# Small\nIts own words.\n")
    run = tmp_path / "run"
    options = ["train.patience=1", "optim.lr=0.0", "evaluate.every=1", "train.steps=50", "rollout.n=16"]
    command = ["train", config, f"model.path={base}", f"run.dir={run}", *options]
    begun = time.gmtime()
    result = brorl(*command)
    assert result.returncode == 0, result.stderr
    text = (run / "summary.json").read_text()
    summary = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    assert summary["steps"] == len(metric_lines(run)) == 2
    assert "nan" not in (result.stdout + result.stderr).lower()
    assert "optim.lr = 0: raise it" in summary["findings"]["weights unchanged"]
    assert result.stdout.splitlines()[-1].removeprefix("warning: ") in summary["findings"].values()

    front, body = card(run)
    assert (front["license"], front["base_model"]) == ("llama3", "them/large")
    assert "Its own words" not in body
    assert f"| `held_out.jsonl` | `data.held_out` | {summary['held_out_prompts']} |" in body
    assert f"| pass@2 | {summary['pass_at_2_before']:.4f} | {summary['pass_at_2_after']:.4f} |" in body

    # The date of the first start is in the checkpoint.
    days = {time.strftime("%Y-%m-%d", moment) for moment in (begun, time.gmtime())}
    assert any(f"| began | {day} (UTC) |" in body for day in days)
    written = (run / "model" / "README.md").read_bytes()
    shutil.rmtree(run / "model")  # A run with a model counts as finished.
    assert brorl(*command).returncode == 0
    assert (run / "model" / "README.md").read_bytes() == written
    assert len(metric_lines(run)) == 2


def test_the_time_limit_ends_refills_and_the_run(config, init, tmp_path):
    options = ["train.max_seconds=1e-3", "train.steps=50", "rollout.n=8", "rollout.refills=1000", "data.held_out=[]"]
    result = brorl("train", config, f"model.path={init}", f"run.dir={tmp_path}", *options)
    assert result.returncode == 0, result.stderr
    assert [row["rounds"] for row in metric_lines(tmp_path)] == [1]


def test_a_student_learns_from_a_teacher_and_resumes_bit_exactly(config, init, warm, tmp_path):
    """Distillation needs no verifier: only held-out prompts have one."""
    files = f"data.mixture=[{{files=['{config.parent / 'train.jsonl'}'], weight=1, verifier='none'}}]"
    options = ["data.train=[]", files, f"teacher.path={warm}", "algo.distill_coef=1", "algo.dynamic_sampling=false"]
    options += ["train.offload=true", "parallel.pipeline=2", "optim.lr=3e-3", "theory.every=0", "train.steps=6"]
    undisturbed, restarted = tmp_path / "undisturbed", tmp_path / "restarted"
    train(config, init, undisturbed, *options)
    shutil.copytree(undisturbed, restarted)
    rewind(restarted, step=3)
    assert "resumed from" in train(config, init, restarted, *options).stderr
    lines = metric_lines(undisturbed)
    assert metric_lines(restarted) == lines
    kl = [row["teacher_kl"] for row in lines]
    assert kl[-1] < 0.9 * kl[0]
    assert {row["reward"] for row in lines} == {0.0}
    assert sum(row["updates"] for row in lines) == 6 * 2  # steps x algo.mini_batches


def test_evaluate_gives_the_result_of_the_run(finished, config, tmp_path):
    """One process instead of two evaluates the same prompts with the same random numbers and results."""
    result = brorl("evaluate", config, f"model.path={finished[0] / 'model'}", f"run.dir={tmp_path}")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("held_out sample") == 3
    evaluation = json.loads((tmp_path / "evaluation.json").read_text())
    summary = json.loads((finished[0] / "summary.json").read_text())
    assert evaluation["pass_at_1"] == summary["pass_at_1_after"]
    assert f"{evaluation['pass_at_1']['mean']:.2%} (" in result.stdout
    assert "evaluate 1/1  elapsed" in result.stderr
    assert set(evaluation["pass_at_k"]) == {"1", "2"}
    assert evaluation["pass_at_k"]["1"] == pytest.approx(evaluation["pass_at_1"]["mean"])


@pytest.mark.fast
def test_a_step_can_span_two_epochs(config, init, tmp_path):
    """Steps of four from ten rows. With this seed a row ends the first epoch and begins the second one."""
    data = tmp_path / "rows.jsonl"
    lines = [{"prompt": f"{i}+{i}=", "answer": str(2 * i), "verifier": "exact"} for i in range(10)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sizes = ("run.seed=3", "rollout.prompts=4", "rollout.n=8", "rollout.max_tokens=24", "train.steps=4")
    files = ("data.held_out=[]", f'data.train=["{data}"]')
    run = tmp_path / "run"
    result = brorl("train", config, f"model.path={init}", f"run.dir={run}", *sizes, *files)
    assert result.returncode == 0, result.stderr
    assert [line["rollouts"] for line in metric_lines(run)] == [4 * 8] * 4
    steps = [read_groups(run / FOLDER, LogEntry("step", step))["prompt_id"].to_pylist() for step in range(4)]
    assert [(len(names), len(set(names))) for names in steps] == [(4, 4), (4, 4), (4, 3), (4, 4)]


def test_a_vocabulary_larger_than_the_tokenizer(config, tmp_path):
    """512 pieces in a vocabulary of 576, as in many published models: engine and trainer agree on all tokens.

    This is also the only whole run with the reference implementation of the ops.
    """
    model = tmp_path / "model"
    run = tmp_path / "run"
    words = [f"{i * i} {i:x} {'abcdefgh'[i % 8 :]}{'hgfedcba'[i // 8 % 8 :]} naïve" for i in range(2000)]
    tokenizer = train_sentencepiece(words, model, 512)
    assert tokenizer.vocab_size == 512
    sizes = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 64, "context": 64}
    write_random_model(qwen2_config(**sizes, vocab=576, eos_token_id=tokenizer.eos_id), model, seed=0)
    options = ["rollout.max_tokens=16", 'rollout.stop_strings=["7"]', "algo.dynamic_sampling=false", "train.steps=2"]
    options.append("data.held_out=[]")
    command = ("train", config, f"model.path={model}", f"run.dir={run}", "ops.implementation=reference")
    result = brorl(*command, *options, "train.verify_weights=always")
    assert result.returncode == 0, result.stderr
    assert all(0 < line["reshard_gap_max"] < 1e-4 for line in metric_lines(run))
    assert all(line["trained_tokens"] > 1000 and line["logprob_gap_max"] < 1e-4 for line in metric_lines(run))


def test_benchmarks_and_their_comparison(finished, config, warm, tmp_path):
    """Another number of processes gives the same answers, so the comparison finds no difference."""
    sums, words = tmp_path / "sums.jsonl", tmp_path / "words.jsonl"
    lines = [{"prompt": f"gcd {i},4", "answer": str(math.gcd(i, 4)), "verifier": "exact"} for i in range(1, 7)]
    sums.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words.write_text(json.dumps({"prompt": "abc", "answer": "cba", "id": "w"}) + "\n")
    benchmarks = f'evaluate.benchmarks=["sums_of_6={sums}", "{words}"]'
    options = ["evaluate.samples=4", benchmarks, "data.train=[]", "data.held_out=[]"]
    model = f"model.path={finished[0] / 'model'}"
    one = brorl("evaluate", config, model, f"run.dir={tmp_path / 'one'}", *options, plots=True)
    assert one.returncode == 0, one.stderr
    two = brorl("evaluate", "--processes", "2", config, model, f"run.dir={tmp_path / 'two'}", *options)
    assert two.returncode == 0, two.stderr
    assert f"evaluate.benchmarks (sums_of_6): 6 prompts from {sums}" in one.stderr
    answers = (tmp_path / "one" / "evaluation.jsonl").read_text()
    assert (tmp_path / "two" / "evaluation.jsonl").read_text() == answers
    prompts = [json.loads(line) for line in answers.splitlines()]
    ids = [*(("sums_of_6", f"sums.jsonl:{i}", 4) for i in range(1, 7)), ("words", "w", 4)]
    assert [(a["benchmark"], a["id"], a["samples"]) for a in prompts] == ids
    evaluation = json.loads((tmp_path / "one" / "evaluation.json").read_text())
    assert evaluation["sampling"] == {"temperature": 0.6, "top_p": 0.95, "max_tokens": 6}
    assert set(evaluation["pass_at_k"]) == {"1", "2", "4"}
    for name, count in (("sums_of_6", 6), ("words", 1)):
        benchmark_prompts = [a for a in prompts if a["benchmark"] == name]
        benchmark = evaluation["benchmarks"][name]
        assert benchmark["prompts"] == len(benchmark_prompts) == count
        assert benchmark["pass_at_1"]["mean"] == pytest.approx(sum(a["right"] for a in benchmark_prompts) / (4 * count))
        assert benchmark["pass_at_k"]["4"] == pytest.approx(sum(a["right"] > 0 for a in benchmark_prompts) / count)
        assert benchmark["response_tokens"] == pytest.approx(sum(a["tokens"] for a in benchmark_prompts) / count)
    parts = evaluation["benchmarks"].values()
    for key in ("pass_at_1", "mean_reward"):
        expected = sum(part[key]["mean"] for part in parts) / 2
        assert evaluation["mean_of_benchmarks"][key]["mean"] == pytest.approx(expected)
    assert "| words | exact | 1 | 4 |" in (tmp_path / "one" / "evaluation.md").read_text()
    assert (tmp_path / "one" / "evaluation.png").stat().st_size > 10_000
    result = brorl("compare", tmp_path / "one", tmp_path / "two", "--out", tmp_path / "both", plots=True)
    assert result.returncode == 0, result.stderr
    compared = json.loads((tmp_path / "both" / "compare.json").read_text())
    assert compared["all"]["paired"]["t"] == 0.0
    assert compared["all"]["prompts"] == 7
    assert (tmp_path / "both" / "compare.md").read_text().strip() in result.stdout
    assert (tmp_path / "both" / "compare.png").stat().st_size > 10_000


def card(run_dir) -> tuple[dict, str]:
    """Return metadata and body of the exported model's card."""
    _, front, body = (run_dir / "model" / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), body


def test_model_card_of_supervised_training(warm):
    front, body = card(warm.parent)
    assert (front["license"], front["tags"]) == ("other", ["megatron-brorl", "sft"])
    assert "| examples per step | 64 |" in body
    assert "scored by" not in body
