"""A reward of one's own trains a model from outside the package, as examples/own_reward has it."""

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
def place(tmp_path_factory) -> Path:
    """A working directory with the example and a model whose tokenizer knows its rows."""
    place = tmp_path_factory.mktemp("own")
    shutil.copytree(REPOSITORY / "examples" / "own_reward", place / "examples" / "own_reward")
    make_model("examples/own_reward/own_reward.toml", "init", cwd=place)
    return place


def train(place: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    options = ["model.path=init", "run.dir=run", *STEPS, *overrides]
    return brorl("train", "examples/own_reward/own_reward.toml", *options, cwd=place)


def test_two_steps_and_the_file_that_they_are_held_to(place):
    # A reward by the length of the response: one that a random model gets some of.
    file = place / "lengths.py"
    file.write_text("def score(response, row):\n    return min(1.0, len(response) / 32)\n")
    done = train(place, "data.verifier=lengths.py:score")
    assert done.returncode == 0, done.stderr
    lines = rows(place / "run")
    assert [line["step"] for line in lines] == [0, 1]
    assert all(0 < line["reward"] < 1 for line in lines)

    # Its checkpoints belong to this very file.
    file.write_text(file.read_text() + "# a comment\n")
    again = train(place, "data.verifier=lengths.py:score", "train.steps=3")
    assert again.returncode == 2
    line = again.stderr.splitlines()[-1]
    assert "was written with another file of verifier lengths.py:score (sha256 " in line


def test_rewards_of_any_size_are_trained_on_and_told_beside_pass_at_1(place):
    """Minus the length of the response: no reward is above 0, and none reaches reward.correct_at.

    Most responses are cut off, which does not bring them to 0.
    """
    (place / "minus.py").write_text("def score(response, row):\n    return -len(response) / 4\n")
    done = train(place, "data.verifier=minus.py:score", "run.dir=minus", "reward.cut_off_factor=0")
    assert done.returncode == 0, done.stderr
    lines = rows(place / "minus")
    assert all(line["reward"] < 0 < line["reward_std"] for line in lines)
    assert [(line["kept_share"], line["all_right_share"], line["all_wrong_share"]) for line in lines] == [(1, 0, 1)] * 2
    assert all(line["grad_norm"] > 0 and line["updates"] == 1 for line in lines)

    # 20 prompts, none of them right, is no proof that none ever is.
    summary = json.loads((place / "minus" / "summary.json").read_text())
    for when in ("before", "after"):
        p, r = summary[f"pass_at_1_{when}"], summary[f"mean_reward_{when}"]
        assert (p["mean"], p["low"], p["high"]) == (0.0, 0.0, pytest.approx(1 - 0.025 ** (1 / 20)))
        assert r["low"] < r["mean"] < r["high"] < 0
        assert r == summary[when]["mean_reward"]
        assert f"reward {when:6}  {r['mean']:.4g}  95% interval {r['low']:.4g} to {r['high']:.4g}" in done.stdout
        assert f"mean reward {r['mean']:.4g} (95% interval {r['low']:.4g} to {r['high']:.4g})" in done.stderr
    assert "warning: verifier 'minus.py:score' gives -0.75 to the reference answer of row sum-3" in done.stderr

    # What people read of the rollouts has the same rewards.
    run = load_run(place / "minus")
    table = run.rollouts(1).to_pylist()
    assert {r["right"] for r in table} == {False}
    assert [r["reward"] for r in table] == [-len(r["answer"]) / 4 for r in table]


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_verifier_that_raises_ends_the_command_before_a_model_is_loaded(place, command):
    (place / "broken.py").write_text("def score(response, row):\n    return nothing\n")
    options = ["model.path=init", "run.dir=broken", *STEPS, "data.verifier=broken.py:score"]
    done = brorl(command, "examples/own_reward/own_reward.toml", *options, cwd=place)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "broken.py" in line]
    assert "row sum-3: broken: NameError: name 'nothing'" in line
    assert "Traceback" not in done.stderr
    assert not list((place / "broken").glob("*.json*"))
