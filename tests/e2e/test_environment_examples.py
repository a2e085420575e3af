"""A step of the examples with environments. Hints and products of rows and rollouts are computed again."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess

import forks
import pytest
from e2e.runs import ENVIRONMENT, REPOSITORY, brorl

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
    assert int(prompt[:2]) <= int(answer) <= int(prompt[6:8])  # The prompt begins with "NN to NN".
    guesses = [int(turn) if re.fullmatch("[0-9]+", turn) else None for turn in turns]
    assert int(answer) not in guesses[:-1]
    hints = ["no number" if g is None else ("higher" if g < int(answer) else "lower") for g in guesses]
    assert observations == [f"<result>{hint}</result>" for hint in hints[: len(observations)]]
    return guesses[-1] == int(answer)


@pytest.fixture
def commands_of(tmp_path):
    """A function that runs a shell script, in which `python` and `brorl` do nothing, and returns their commands."""
    for name in ("python", "brorl"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text('#!/usr/bin/env bash\nprintf \'%q \' "${0##*/}" "$@" >&2\necho >&2\n')
        program.chmod(0o755)

    def run(*script, **environment):
        env = {**ENVIRONMENT, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", **environment}
        result = subprocess.run(["bash", *script], capture_output=True, text=True, env=env, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        return [shlex.split(line) for line in result.stderr.splitlines()]

    return run


@pytest.mark.parametrize(
    ("check", "target", "processes", "sft_steps"), [(calculator, "target", "2", 50), (guessing, "feedback", "1", 20)]
)
def test_example(tmp_path, commands_of, check, target, processes, sft_steps):
    name = check.__name__
    for folder in ("examples", "tools"):
        shutil.copytree(REPOSITORY / folder, tmp_path / folder)
    small = ["sft.examples_per_step=64", "train.steps=1", "rollout.n=8", "rollout.prompts=6", "data.held_out=[]"]
    commands = commands_of("examples/environment.sh", name, *small, f"sft.steps={sft_steps}", PROCESSES=processes)
    assert [command[:2] for command in commands] == [
        ["python", "examples/environments/make_data.py"],
        ["python", "tools/make_tiny_model.py"],
        ["brorl", "sft"],
        ["brorl", "train"],
    ]
    for program, *words in commands:
        if program == "brorl":
            result = brorl(*words, cwd=tmp_path)
        else:
            result = forks.script(tmp_path / words[0], *words[1:], cwd=tmp_path)
        assert result.returncode == 0, result.stderr

    train, held_out = (
        [json.loads(line) for line in (tmp_path / f"runs/environments/{name}_{part}.jsonl").read_text().splitlines()]
        for part in ("train", "held_out")
    )
    assert {row["prompt"] for row in train}.isdisjoint(row["prompt"] for row in held_out)
    for row in train:
        parts = re.split("(<result>.*?</result>)", row[target])
        is_right = check(parts[::2], parts[1::2], row["prompt"], row["answer"])
        assert is_right or len(parts) == 11  # A game may end after six turns with five hints between them.

    run = load_run(tmp_path / "runs" / name)
    groups = {group["group"]: (group["prompt"], group["reference"]) for group in run.groups(0).to_pylist()}
    rollouts = run.rollouts(0).to_pylist()
    assert any(len(rollout["turns"]) >= 3 for rollout in rollouts)
    for rollout in rollouts:
        turns, observations = ([t["text"] for t in rollout["turns"] if t["sampled"] is flag] for flag in (True, False))
        assert rollout["reward"] == check(turns, observations, *groups[rollout["group"]])
