"""Tests of training with a user's reward function, on the configuration of examples/own_reward."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections import Counter
from math import comb
from pathlib import Path

import pytest
from e2e.runs import REPOSITORY, brorl, make_model, metric_lines

from megatron_brorl import load_run

STEPS = ["rollout.n=16", "rollout.prompts=4", "train.steps=2", "train.checkpoint_every=1", "evaluate.samples=2"]
STEPS += ["reward.cut_off_factor=1.0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A working directory with the example and a model with a tokenizer for its rows."""
    folder = tmp_path_factory.mktemp("own")
    shutil.copytree(REPOSITORY / "examples" / "own_reward", folder / "examples" / "own_reward")
    make_model("examples/own_reward/own_reward.toml", "init", cwd=folder)
    return folder


def train(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    options = ["model.path=init", "run.dir=run", *STEPS, *overrides]
    return brorl("train", "examples/own_reward/own_reward.toml", *options, cwd=folder)


def test_negative_rewards_are_trained_on_and_reported_next_to_pass_at_1(folder):
    """The reward is minus the length of the response, so no response reaches reward.correct_at.

    Most responses are cut off, and keep their negative reward.
    """
    (folder / "minus.py").write_text("def score(response, row):\n    return -len(response) / 4\n")
    result = train(folder, "data.verifier=minus.py:score", "run.dir=minus", "reward.cut_off_factor=0")
    assert result.returncode == 0, result.stderr
    lines = metric_lines(folder / "minus")
    assert all(line["reward"] < 0 < line["reward_std"] for line in lines)
    assert [(line["kept_share"], line["all_right_share"], line["all_wrong_share"]) for line in lines] == [(1, 0, 1)] * 2
    assert all(line["grad_norm"] > 0 and line["updates"] == 1 for line in lines)

    # No success in 20 prompts gives the Clopper-Pearson interval from 0 to 1 - 0.025^(1/20).
    summary = json.loads((folder / "minus" / "summary.json").read_text())
    for when in ("before", "after"):
        success, reward = summary[f"pass_at_1_{when}"], summary[f"mean_reward_{when}"]
        assert (success["mean"], success["low"], success["high"]) == (0.0, 0.0, pytest.approx(1 - 0.025 ** (1 / 20)))
        assert reward["low"] < reward["mean"] < reward["high"] < 0
        assert reward == summary[when]["mean_reward"]
        interval = f"{reward['low']:.4g} to {reward['high']:.4g}"
        assert f"reward {when:6}  {reward['mean']:.4g}  95% interval {interval}" in result.stdout
        assert f"mean reward {reward['mean']:.4g} (95% interval {interval})" in result.stderr
    assert "'minus.py:score' gives -0.75 to the reference answer of row sum-3" in result.stderr

    # The last line warns about reward.correct_at. pass-rates prints the share of 8 of 16 rollouts whose rewards differ.
    assert "warning: no reward of the run reached reward.correct_at = 1 (mean " in result.stdout.splitlines()[-1]
    run = load_run(folder / "minus")
    counts = Counter((r["prompt_id"], r["reward"]) for step in (0, 1) for r in run.rollouts(step).to_pylist())
    share = 1 - sum(comb(count, 8) for count in counts.values()) / comb(16, 8) / len({prompt for prompt, _ in counts})
    assert re.search(rf"^ +8 +{share:.1%} ", brorl("pass-rates", folder / "minus").stdout, re.MULTILINE)

    # The rollout log has the same rewards.
    table = run.rollouts(1).to_pylist()
    assert {r["right"] for r in table} == {False}
    assert [r["reward"] for r in table] == [-len(r["answer"]) / 4 for r in table]


@pytest.mark.parametrize("setting", ["data.verifier=own.py:score", "environment.factory=own.py:Game"])
def test_own_columns_reach_functions_and_results(folder, setting):
    """Each reward is a tenth of the column "low", so means over rows are known in advance. One row has no reward."""
    name = setting.partition(".")[0]
    data = [{"pair": f"{i} {j}", "more": j, "size": "two" if j > 9 else 1, "low": i} for i in (2, 5) for j in (7, 11)]
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*data, {**data[0], "low": 3}]))
    (folder / "own.py").write_text("""
def score(response, row):
    assert row["columns"]["low"] != 3
    return row["columns"]["low"] / 10
advantage = lambda rewards, mask, rows: 0 * rewards * rows[0]["columns"]["low"]
class Game:
    def reset(self, row): self.row = row
    def step(self, text): return "", True
    def reward(self): return score("", self.row)
""")
    flags = ["--data=own.jsonl", "--held-out=own.jsonl", "--prompt=pair", "--answer=more", "--task=size"]
    written = brorl("init", f"{name}.toml", "--model=init", *flags, "--reward=own.py:score", cwd=folder)
    assert (written.returncode, "fill in" in written.stdout) == (0, False), written.stderr
    steps = [*STEPS, "train.steps=1", "rollout.prompts=5", "reward.correct_at=0.5", "rollout.max_tokens=4"]
    steps.append("algo.dynamic_sampling=false")
    result = brorl("train", f"{name}.toml", setting, *steps, "algo.advantage=own.py:advantage", cwd=folder)
    assert result.returncode == 0, result.stderr
    before = json.loads((folder / "runs" / name / "summary.json").read_text())["before"]
    assert before["mean_reward"]["mean"] == pytest.approx((0.2 + 0.2 + 0.5 + 0.5 + 0) / 5)
    assert ("environment raised 16x" in result.stderr) == ("Game" in setting)  # the 16 rollouts of the row with low = 3
    # A reward of 0.5 is right: one of the three rows of task 1 and one of the two of task "two" have it.
    assert {name: task["mean"] for name, task in before["by_task"].items()} == {"1": 1 / 3, "two": 1 / 2}


def test_a_verifier_that_raises_ends_an_evaluation_before_a_model_is_loaded(folder):
    """test_dry_run.py checks the same for training."""
    (folder / "broken.py").write_text("def score(response, row):\n    return nothing\n")
    options = ["model.path=init", "run.dir=broken", *STEPS, "data.verifier=broken.py:score"]
    result = brorl("evaluate", "examples/own_reward/own_reward.toml", *options, cwd=folder)
    assert result.returncode == 2
    (line,) = [line for line in result.stderr.splitlines() if "broken.py" in line]
    assert "row sum-3: broken: NameError: name 'nothing'" in line
    assert "Traceback" not in result.stderr
    assert not (folder / "broken").exists()


OWN = """
from pathlib import Path
calls = 0
def late(call):  # Whether more than `call` calls have begun. The first one is the check before the run.
    global calls
    calls += 1
    return calls > call
def score(response, row): {score}; return len(response) % 7
def advantage(rewards, mask, rows): {advantage}; return rewards - rewards.mean(1, keepdim=True)
def loss(log_probs, old_log_probs, advantages, **_): {loss}; return -(log_probs - old_log_probs).exp() * advantages
"""
NAMES = {"data.verifier": "mine.py:score", "algo.advantage": "mine.py:advantage", "algo.policy_loss": "mine.py:loss"}
LONG = ["train.steps=4", "train.checkpoint_every=0", "algo.mini_batches=2", "rollout.partial_tokens=5"]


@pytest.fixture(scope="module")
def run_mine(folder):
    """Return a function that trains with OWN. Its first argument has the code that each function of OWN runs first."""

    def run(code: dict[str, str], *options: str) -> tuple[subprocess.CompletedProcess[str], str]:
        text = OWN.format(**{"score": "0", "advantage": "0", "loss": "0"} | code)
        (folder / "mine.py").write_text(text)
        result = train(folder, *LONG, *(f"{key}={value}" for key, value in NAMES.items()), *options)
        return result, hashlib.sha256(text.encode()).hexdigest()

    run({}, "run.dir=undisturbed")
    return run


@pytest.mark.parametrize(
    ("code", "is_lost"),
    [
        ({"loss": "1 / (not late(5))"}, False),  # in the first update of a step
        ({"loss": "1 / (not late(6))"}, True),  # in its second update
        ({"advantage": "late(2) and Path('late').touch()", "score": "1 / (not Path('late').exists())"}, False),
    ],
)
def test_a_function_that_raises_loses_no_step(folder, run_mine, code, is_lost):
    expected = metric_lines(folder / "undisturbed")
    assert all(line["carried_rollouts"] > 0 for line in expected)
    shutil.rmtree(folder / "failed", ignore_errors=True)
    first, broken_sha256 = run_mine(code, "run.dir=failed")
    message = first.stderr.splitlines()[-1]
    steps = len(metric_lines(folder / "failed"))
    state = f"steps 1 to {steps} are lost" if is_lost else f"the state after {steps} steps is saved;"
    assert (first.returncode, "Traceback" in first.stderr, 0 < steps < 4) == (2, False, True)
    assert all(text in message for text in ("mine.py, line", "ZeroDivisionError", state, "--accept-changed-functions"))

    if "loss" not in code:
        refused, _ = run_mine({}, "run.dir=failed")
        assert (refused.returncode, "--accept-changed-functions" in refused.stderr) == (2, True)
    result, repaired_sha256 = run_mine({}, "run.dir=failed", "--accept-changed-functions")
    assert result.returncode == 0, result.stderr
    assert metric_lines(folder / "failed") == expected
    changes = json.loads((folder / "failed" / "run.json").read_text())["starts"][-1]["changes"]
    hashes = [broken_sha256, repaired_sha256]
    assert changes == {f"own_functions.{name}": hashes for name in NAMES.values() if not is_lost}
