"""Whole runs on two processes: repeatable bit for bit, resumable bit for bit, with everything a user is promised."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time

import metric_faults
import pytest
import torch
from e2e.runs import brorl, rows, start
from random_model import qwen2_config, write_random_model
from safetensors.torch import load_file
from sentencepiece import SentencePieceProcessor
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_brorl.data.sentencepiece import train_sentencepiece
from megatron_brorl.rollout_log import FOLDER, Moment, moments, read_groups, read_rollouts


@pytest.fixture(scope="module")
def finished(config, warm, tmp_path_factory):
    """The run that nobody disturbed."""
    directory = tmp_path_factory.mktemp("runs") / "whole"
    done = brorl("train", "--processes", "2", config, f"model.path={warm}", f"run.dir={directory}", figures=True)
    assert done.returncode == 0, done.stderr
    return directory, done


def test_supervised_training_lowers_the_loss(warm):
    losses = [row["loss"] for row in rows(warm.parent)]
    assert len(losses) == 60
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_run_leaves_what_is_promised(finished, warm):
    directory, done = finished
    lines = rows(directory)
    assert [line["step"] for line in lines] == list(range(8))
    assert all(line["rollouts"] == 6 * 32 for line in lines)
    assert sum(line["updates"] for line in lines) >= 8  # it did train
    assert all(0 <= line["kept_share"] <= 1 for line in lines)
    assert all(line["logprob_gap_max"] <= 1e-4 for line in lines)
    assert [line["step"] for line in lines if "pass_at_1" in line] == [3]
    summary = json.loads((directory / "summary.json").read_text())
    assert metric_faults.of_summary(summary) == []
    for key in ("pass_at_1_before", "pass_at_1_after"):
        assert 0 <= summary[key]["low"] <= summary[key]["mean"] <= summary[key]["high"] <= 1
    for when in ("before", "after"):  # pass@k wherever pass@1 stands
        wide = summary[when]["pass_at_k"]["2"]
        assert summary[f"pass_at_2_{when}"] == wide >= summary[f"pass_at_1_{when}"]["mean"]
        assert f"held-out {when}: pass@1 {100 * summary[f'pass_at_1_{when}']['mean']:.1f}%" in done.stderr
        assert f", pass@2 {100 * wide:.1f}%" in done.stderr
        (line,) = (line for line in done.stdout.splitlines() if line.startswith(f"pass@1 {when}"))
        assert line.endswith(f"pass@2  {wide:.4f}")
    assert f"held-out after 4 steps: pass@1 {100 * lines[3]['pass_at_1']:.1f}%" in done.stderr
    assert f"pass@2 {100 * lines[3]['pass_at_2']:.1f}%" in done.stderr
    assert "6 prompts x 32 rollouts = 192 -> 2 optimizer steps" in done.stderr
    assert set(summary["findings"]) <= {"task never right"}  # words backward are beyond this model
    assert (summary["held_out_prompts"], summary["rollouts_per_prompt"], summary["steps"]) == (24, 32, 8)
    assert summary["job_seconds"] > 0
    assert summary["peak_rss_mib"] > 100
    assert (directory / "curves.png").stat().st_size > 10_000
    assert list((directory / "tensorboard").glob("events.*"))
    assert (directory / "checkpoints" / "latest").read_text().strip() == "step_00000008"
    # What was sampled: every step, all three evaluations, and three samples of each on the console.
    there = moments(directory / "rollouts")
    assert [m.number for m in there if m.kind == "step"] == list(range(8))
    assert [m.number for m in there if m.kind == "evaluation"] == [0, 4, 8]
    for line in lines:
        groups = read_groups(directory / "rollouts", Moment("step", line["step"])).to_pylist()
        assert sum(g["right"] for g in groups) / (6 * 32) == pytest.approx(line["reward"])
        assert sum(g["trained"] for g in groups) / 6 == pytest.approx(line["kept_share"])
        assert sum(g["recorded"] for g in groups) == 4 * 32
    groups = read_groups(directory / "rollouts", Moment("evaluation", 8)).to_pylist()
    assert sum(g["right"] for g in groups) / (24 * 2) == pytest.approx(summary["pass_at_1_after"]["mean"])
    assert len(read_rollouts(directory / "rollouts", Moment("evaluation", 8))) == 24 * 2
    assert done.stderr.count("held-out sample") == 3 * 3
    # The console has the numbers of metrics.jsonl.
    told = [re.match(r"train \d/8 .* step (\d) +reward ([\d.]+)", line) for line in done.stderr.splitlines()]
    assert [(int(m[1]), m[2]) for m in told if m] == [(line["step"], f"{line['reward']:.3f}") for line in lines]
    assert "pass@1 after" in done.stdout
    trained = AutoModelForCausalLM.from_pretrained(directory / "model")
    before = load_file(warm / "model.safetensors")
    assert any(not torch.equal(p, before[n]) for n, p in trained.named_parameters() if n in before)
    assert (directory / "model" / "tokenizer.model").read_bytes() == (warm / "tokenizer.model").read_bytes()
    theirs = AutoTokenizer.from_pretrained(directory / "model")
    library = SentencePieceProcessor(model_file=str(warm / "tokenizer.model"))
    assert theirs("12, 18=").input_ids == library.encode("12, 18=")
    assert trained.generation_config.eos_token_id == library.eos_id()


def test_verify_reshard_changes_nothing_and_tells_the_gap(finished, config, warm, tmp_path):
    """On two pipeline stages: the run goes as ever, and every step says how far the engines are from the actor."""
    command = ["train", "--processes", "2", config, f"model.path={warm}", f"run.dir={tmp_path}", "parallel.pipeline=2"]
    done = brorl(*command, "train.steps=2", "train.verify_reshard=always")
    assert done.returncode == 0, done.stderr
    assert all(0 < row["reshard_gap_max"] < 1e-4 for row in rows(tmp_path))
    assert all(row["refit_again"] == 0 for row in rows(tmp_path))
    assert not any("reshard_gap_max" in row for row in rows(finished[0]))
    done = brorl(*command, "train.steps=3", "train.verify_reshard=always", "train.verify_tolerance=1e-12")
    assert done.returncode == 2
    assert "train.verify_reshard: after version" in done.stderr
    assert done.stderr.splitlines()[-1].count("train.verify_tolerance = 1e-12") == 1


def recorded(run_dir) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run_dir / "rollouts").iterdir()}


def wait_for(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_killed_after_a_checkpoint_and_resumed(finished, config, warm, tmp_path):
    """A rank gets SIGKILL after step 3's checkpoint; the run ends by its name. Then the same command: the bits of the
    undisturbed run."""
    command = ("train", "--processes", "2", config, f"model.path={warm}", f"run.dir={tmp_path}")
    process = start(*command)
    wait_for((tmp_path / "checkpoints" / "latest").exists, process)
    metrics = tmp_path / "metrics.jsonl"
    wait_for(lambda: metrics.read_text().count("\n") >= 4, process)  # one step beyond the checkpoint: it is replayed
    os.kill(next(p for p in _ranks(tmp_path) if p != process.pid), signal.SIGKILL)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + signal.SIGKILL
    assert "was ended by SIGKILL (out of memory?)" in output.splitlines()[-1]
    assert not (tmp_path / "summary.json").exists()
    done = brorl(*command)
    assert done.returncode == 0, done.stderr
    assert "resumed from" in done.stderr
    assert rows(tmp_path) == rows(finished[0])
    assert (tmp_path / "model/model.safetensors").read_bytes() == (finished[0] / "model/model.safetensors").read_bytes()
    assert recorded(tmp_path) == recorded(finished[0])


def _ranks(run_dir) -> list[int]:
    """The processes of this run, the launcher among them."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as f:
                    if f"run.dir={run_dir}".encode() in f.read().split(b"\0"):
                        found.append(int(entry))
            except OSError:
                continue
    return found


def test_a_signal_saves_and_says_how_to_go_on(finished, config, warm, tmp_path):
    command = ("train", "--processes", "2", config, f"model.path={warm}", f"run.dir={tmp_path}")
    process = start(*command)
    metrics = tmp_path / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 1, process)
    process.send_signal(signal.SIGUSR1)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 75, output
    assert (tmp_path / "checkpoints" / "latest").exists()
    done = brorl(*command)
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path) == rows(finished[0])


def test_a_job_saves_before_a_step_that_it_has_no_time_for(finished, config, warm, tmp_path):
    command = ("train", "--processes", "2", config, f"model.path={warm}", f"run.dir={tmp_path}")
    done = brorl(*command, SLURM_JOB_END_TIME="1")  # in 1970: no second step fits
    assert done.returncode == 75, done.stderr
    assert "the job ends at" in done.stdout + done.stderr
    assert len(rows(tmp_path)) == 1
    done = brorl(*command)
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path) == rows(finished[0])


def test_partial_rollouts_resumed(config, warm, tmp_path):
    """Responses of up to 6 tokens at 2 per step; a run that stops while some wait goes on with the same bits."""
    options = ["rollout.partial_tokens=2", "rollout.max_carried_steps=2", "evaluate.every=0"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for directory, steps in ((whole, 4), (parts, 2), (parts, 4)):
        command = ["train", "--processes", "2", config, f"model.path={warm}", f"run.dir={directory}", *options]
        done = brorl(*command, f"train.steps={steps}")
        assert done.returncode == 0, done.stderr
    assert rows(parts) == rows(whole)
    assert (parts / "model/model.safetensors").read_bytes() == (whole / "model/model.safetensors").read_bytes()
    assert rows(whole)[1]["carried"] > 0  # at the checkpoint in between
    # The first group closes in the third step, whose two updates lie between the fourth step and the second.
    assert [row["updates"] for row in rows(whole)] == [0, 0, 2, 2]
    assert [row["staleness_max"] for row in rows(whole)] == [0, 0, 0, 2]
    assert all(row["rollouts"] % 32 == 0 for row in rows(whole))  # whole groups


def test_a_whole_recipe_resumed(config, warm, tmp_path):
    """Critic, reference with a reset between the checkpoints, refills and shaping: the bits of the undisturbed run."""
    options = [
        *("algo.advantage=gae", "algo.kl_coef=0.01", "algo.kl_in=reward", "algo.kl_estimator=k1", "algo.epochs=2"),
        *("reference.reset_every=3", "reference.reset_optimizer=true", "rollout.refills=1", "rollout.n=8"),
        *("shaping.overlong_tokens=3", "shaping.repetition_ngram=2", "critic.lr=1e-3", "critic.warmup_steps=1"),
        "evaluate.every=0",
    ]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for directory, steps in ((whole, 4), (parts, 2), (parts, 3), (parts, 4)):
        command = ["train", "--processes", "2", config, f"model.path={warm}", f"run.dir={directory}", *options]
        done = brorl(*command, f"train.steps={steps}")
        assert done.returncode == 0, done.stderr
    assert rows(parts) == rows(whole)
    assert (parts / "model/model.safetensors").read_bytes() == (whole / "model/model.safetensors").read_bytes()
    assert [row["reference_reset"] for row in rows(whole)] == [0, 0, 1, 0]
    assert rows(whole)[0]["updates"] == 0 < rows(whole)[0]["critic_updates"]
    assert len({row["prompts_sampled"] for row in rows(whole)}) > 1  # rounds are sized by what was kept


def test_a_run_that_stalls_or_is_out_of_time_ends(config, warm, tmp_path):
    """The model does not change: the second evaluation ends the run; started again, it is still at its end."""
    command = ["train", "--processes", "2", config, f"model.path={warm}", f"run.dir={tmp_path / 'stalls'}"]
    options = ["train.patience=1", "optim.lr=0.0", "evaluate.every=2", "train.steps=50"]
    for _ in range(2):
        done = brorl(*command, *options)
        assert done.returncode == 0, done.stderr
        assert len(rows(tmp_path / "stalls")) == 4
    assert json.loads((tmp_path / "stalls" / "summary.json").read_text())["steps"] == 4
    command[-1] = f"run.dir={tmp_path / 'time'}"
    done = brorl(*command, "train.max_seconds=1e-3", "train.steps=50")
    assert done.returncode == 0, done.stderr
    assert len(rows(tmp_path / "time")) == 1


def test_evaluate_repeats_the_run_s_own_evaluation(finished, config, tmp_path):
    """Another process, another number of ranks: the same held-out prompts, random streams and figures."""
    done = brorl("evaluate", config, f"model.path={finished[0] / 'model'}", f"run.dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("held_out sample") == 3
    result = json.loads((tmp_path / "evaluation.json").read_text())
    summary = json.loads((finished[0] / "summary.json").read_text())
    assert result["pass_at_1"] == summary["pass_at_1_after"]
    assert f"pass@1 {result['pass_at_1']['mean']:.4f}" in done.stdout
    assert "evaluate 48/48  elapsed" in done.stderr
    assert set(result["pass_at_k"]) == {"1", "2"}
    assert result["pass_at_k"]["1"] == pytest.approx(result["pass_at_1"]["mean"])


@pytest.mark.fast
def test_a_step_that_spans_two_epochs(config, init, tmp_path):
    """Ten rows in steps of four: with this seed the third step holds one row as the last of an epoch and a first."""
    data = tmp_path / "rows.jsonl"
    lines = [{"prompt": f"{i}+{i}=", "answer": str(2 * i), "verifier": "exact"} for i in range(10)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sizes = ("run.seed=3", "rollout.prompts=4", "rollout.n=8", "rollout.max_tokens=24", "train.steps=4")
    files = ("data.held_out=[]", f'data.train=["{data}"]')
    run = tmp_path / "run"
    done = brorl("train", config, f"model.path={init}", f"run.dir={run}", *sizes, *files)
    assert done.returncode == 0, done.stderr
    assert [line["rollouts"] for line in rows(run)] == [4 * 8] * 4
    steps = [read_groups(run / FOLDER, Moment("step", step))["prompt_id"].to_pylist() for step in range(4)]
    assert [(len(names), len(set(names))) for names in steps] == [(4, 4), (4, 4), (4, 3), (4, 4)]


@pytest.mark.parametrize("implementation", ["fused", "reference"])
def test_a_vocabulary_padded_beyond_the_tokenizers(config, tmp_path, implementation):
    """512 pieces padded to 576, as many published models are: engine and trainer agree on every token, and go on."""
    model, run = tmp_path / "model", tmp_path / "run"
    words = [f"{i * i} {i:x} {'abcdefgh'[i % 8 :]}{'hgfedcba'[i // 8 % 8 :]} naïve" for i in range(2000)]
    tokenizer = train_sentencepiece(words, model, 512)
    assert tokenizer.vocab_size == 512
    sizes = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 64, "context": 64}
    write_random_model(qwen2_config(**sizes, vocab=576, eos_token_id=tokenizer.eos_id), model, 0)
    options = ("rollout.max_tokens=16", 'rollout.stop_strings=["7"]', "algo.dynamic_sampling=false", "train.steps=2")
    command = ("train", config, f"model.path={model}", f"run.dir={run}", f"ops.implementation={implementation}")
    done = brorl(*command, *options, "train.verify_reshard=always")
    assert done.returncode == 0, done.stderr
    assert all(0 < line["reshard_gap_max"] < 1e-4 for line in rows(run))
    assert all(line["trained_tokens"] > 1000 and line["logprob_gap_max"] < 1e-4 for line in rows(run))


def test_benchmarks_and_their_comparison(finished, config, warm, tmp_path):
    """Two files; the same answers by another number of processes, and so a comparison without a difference."""
    sums, words = tmp_path / "sums.jsonl", tmp_path / "words.jsonl"
    lines = [{"prompt": f"gcd {i},4", "answer": str(math.gcd(i, 4)), "verifier": "exact"} for i in range(1, 7)]
    sums.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words.write_text(json.dumps({"prompt": "abc", "answer": "cba", "id": "w"}) + "\n")
    benchmarks = f'evaluate.benchmarks=["sums_of_6={sums}", "{words}"]'
    ask = ["evaluate.samples=4", benchmarks, "data.train=[]", "data.held_out=[]"]
    model = f"model.path={finished[0] / 'model'}"
    one = brorl("evaluate", config, model, f"run.dir={tmp_path / 'one'}", *ask, figures=True)
    assert one.returncode == 0, one.stderr
    two = brorl("evaluate", "--processes", "2", config, model, f"run.dir={tmp_path / 'two'}", *ask)
    assert two.returncode == 0, two.stderr
    assert f"evaluate.benchmarks (sums_of_6): 6 prompts from {sums}" in one.stderr
    answers = (tmp_path / "one" / "evaluation.jsonl").read_text()
    assert (tmp_path / "two" / "evaluation.jsonl").read_text() == answers
    found = [json.loads(line) for line in answers.splitlines()]
    assert [(a["benchmark"], a["id"], a["samples"]) for a in found] == [
        *(("sums_of_6", f"sums.jsonl:{i}", 4) for i in range(1, 7)),
        ("words", "w", 4),
    ]
    result = json.loads((tmp_path / "one" / "evaluation.json").read_text())
    assert result["sampling"] == {"temperature": 0.6, "top_p": 0.95, "top_k": 0, "max_tokens": 6}
    assert set(result["pass_at_k"]) == {"1", "2", "4"}
    for name, count in (("sums_of_6", 6), ("words", 1)):
        mine, part = [a for a in found if a["benchmark"] == name], result["benchmarks"][name]
        assert part["prompts"] == len(mine) == count
        assert part["pass_at_1"]["mean"] == pytest.approx(sum(a["right"] for a in mine) / (4 * count))
        assert part["pass_at_k"]["4"] == pytest.approx(sum(a["right"] > 0 for a in mine) / count)
        assert part["response_tokens"] == pytest.approx(sum(a["tokens"] for a in mine) / count)
    parts = result["benchmarks"].values()
    for key in ("pass_at_1", "mean_reward"):
        assert result["mean_of_benchmarks"][key]["mean"] == pytest.approx(sum(part[key]["mean"] for part in parts) / 2)
    assert "| words | exact | 1 | 4 |" in (tmp_path / "one" / "evaluation.md").read_text()
    assert (tmp_path / "one" / "evaluation.png").stat().st_size > 10_000
    done = brorl("compare", tmp_path / "one", tmp_path / "two", "--out", tmp_path / "both", figures=True)
    assert done.returncode == 0, done.stderr
    compared = json.loads((tmp_path / "both" / "compare.json").read_text())
    assert compared["all"]["paired"]["t"] == 0.0
    assert compared["all"]["prompts"] == 7
    assert (tmp_path / "both" / "compare.md").read_text().strip() in done.stdout
    assert (tmp_path / "both" / "compare.png").stat().st_size > 10_000
