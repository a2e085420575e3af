"""Two steps of the examples with environments. Hints and products of rows and rollouts are computed again."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from e2e.runs import ENVIRONMENT, REPOSITORY
from e2e.test_examples import PATH, log_of

from megatron_brorl import load_run


def calculator(turns: list[str], observations: list[str], prompt: str, answer: str) -> bool:
    """Check the results of the calculator, and return whether the final answer is correct."""
    a, b = map(int, prompt.strip("=").split("*"))
    assert int(answer) == a * b
    for turn, observation in zip(turns, observations, strict=False):
        call = re.fullmatch(r"<call>calculate: (0|[1-9]\d*)\*(0|[1-9]\d*)</call>", turn)
        assert not call or observation == f"<result>{int(call[1]) * int(call[2])}</result>"
    return re.findall(r"\d+", turns[-1])[-1:] == [answer]


def guessing(turns: list[str], observations: list[str], prompt: str, answer: str) -> bool:
    """Check the hints of a game, and return whether the number was guessed."""
    assert int(prompt[:2]) <= int(answer) <= int(prompt[6:8])
    guesses = [int(turn) if re.fullmatch("[0-9]+", turn) else None for turn in turns]
    assert int(answer) not in guesses[:-1]
    hints = ["no number" if g is None else "higher" if g < int(answer) else "lower" for g in guesses]
    assert observations == [f"<result>{hint}</result>" for hint in hints[: len(observations)]]
    return guesses[-1] == int(answer)


@pytest.mark.parametrize(
    ("check", "target", "processes", "sft_steps"), [(calculator, "target", "2", 50), (guessing, "feedback", "1", 20)]
)
def test_example(tmp_path, check, target, processes, sft_steps):
    name = check.__name__
    for part in ("examples", "tools"):
        shutil.copytree(REPOSITORY / part, tmp_path / part)
    env = {**ENVIRONMENT, "PATH": PATH, "PYTHONPATH": str(REPOSITORY), "PROCESSES": processes}
    small = ["sft.examples_per_step=64", "train.steps=2", "rollout.n=8", "rollout.prompts=6", "data.held_out=[]"]
    command = ["bash", "examples/environment.sh", name, *small, f"sft.steps={sft_steps}"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    train, held_out = (log_of(tmp_path / f"runs/environments/{name}_{part}.jsonl") for part in ("train", "held_out"))
    assert {row["prompt"] for row in train}.isdisjoint(row["prompt"] for row in held_out)
    for row in train:
        parts = re.split("(<result>.*?</result>)", row[target])
        assert check(parts[::2], parts[1::2], row["prompt"], row["answer"]) or len(parts) == 11

    run = load_run(tmp_path / "runs" / name)
    groups = {group["group"]: (group["prompt"], group["reference"]) for group in run.groups(1).to_pylist()}
    rollouts = run.rollouts(1).to_pylist()
    assert any(len(rollout["turns"]) >= 3 for rollout in rollouts)
    for rollout in rollouts:
        turns, observations = ([t["text"] for t in rollout["turns"] if t["sampled"] is flag] for flag in (True, False))
        assert rollout["reward"] == check(turns, observations, *groups[rollout["group"]])
