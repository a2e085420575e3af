"""Tests of training with a user's reward function, on the configuration of examples/own_reward."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from e2e.runs import REPOSITORY, brorl, make_model, rows

from megatron_brorl import load_run

STEPS = [
    "rollout.n=16",
    "rollout.prompts=4",
    "train.steps=2",
    "evaluate.samples=2",
    "train.checkpoint_every=1",
    "reward.cut_off_factor=1.0",
]


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


def test_checkpoints_belong_to_one_version_of_the_reward_file(folder):
    # A random model gets some reward for the length of its responses.
    file = folder / "lengths.py"
    file.write_text("def score(response, row):\n    return min(1.0, len(response) / 32)\n")
    done = train(folder, "data.verifier=lengths.py:score")
    assert done.returncode == 0, done.stderr
    lines = rows(folder / "run")
    assert [line["step"] for line in lines] == [0, 1]
    assert all(0 < line["reward"] < 1 for line in lines)

    # The checkpoints record the hash of the file.
    file.write_text(file.read_text() + "# a comment\n")
    again = train(folder, "data.verifier=lengths.py:score", "train.steps=3")
    assert again.returncode == 2
    line = again.stderr.splitlines()[-1]
    assert "was written with another version of lengths.py:score (sha256 " in line


def test_negative_rewards_are_trained_on_and_reported_next_to_pass_at_1(folder):
    """The reward is minus the length of the response, so no response reaches reward.correct_at.

    Most responses are cut off, and keep their negative reward.
    """
    (folder / "minus.py").write_text("def score(response, row):\n    return -len(response) / 4\n")
    done = train(folder, "data.verifier=minus.py:score", "run.dir=minus", "reward.cut_off_factor=0")
    assert done.returncode == 0, done.stderr
    lines = rows(folder / "minus")
    assert all(line["reward"] < 0 < line["reward_std"] for line in lines)
    assert [(line["kept_share"], line["all_right_share"], line["all_wrong_share"]) for line in lines] == [(1, 0, 1)] * 2
    assert all(line["grad_norm"] > 0 and line["updates"] == 1 for line in lines)

    # No success in 20 prompts gives the Clopper-Pearson interval from 0 to 1 - 0.025^(1/20).
    summary = json.loads((folder / "minus" / "summary.json").read_text())
    for when in ("before", "after"):
        p, r = summary[f"pass_at_1_{when}"], summary[f"mean_reward_{when}"]
        assert (p["mean"], p["low"], p["high"]) == (0.0, 0.0, pytest.approx(1 - 0.025 ** (1 / 20)))
        assert r["low"] < r["mean"] < r["high"] < 0
        assert r == summary[when]["mean_reward"]
        assert f"reward {when:6}  {r['mean']:.4g}  95% interval {r['low']:.4g} to {r['high']:.4g}" in done.stdout
        assert f"mean reward {r['mean']:.4g} (95% interval {r['low']:.4g} to {r['high']:.4g})" in done.stderr
    assert "warning: verifier 'minus.py:score' gives -0.75 to the reference answer of row sum-3" in done.stderr

    # The rollout log has the same rewards.
    run = load_run(folder / "minus")
    table = run.rollouts(1).to_pylist()
    assert {r["right"] for r in table} == {False}
    assert [r["reward"] for r in table] == [-len(r["answer"]) / 4 for r in table]


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_verifier_that_raises_ends_the_command_before_a_model_is_loaded(folder, command):
    (folder / "broken.py").write_text("def score(response, row):\n    return nothing\n")
    options = ["model.path=init", "run.dir=broken", *STEPS, "data.verifier=broken.py:score"]
    done = brorl(command, "examples/own_reward/own_reward.toml", *options, cwd=folder)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "broken.py" in line]
    assert "row sum-3: broken: NameError: name 'nothing'" in line
    assert "Traceback" not in done.stderr
    assert not (folder / "broken").exists()
