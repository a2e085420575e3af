"""Tests of runs that are stopped or killed and started again, on two processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time

import forks
import psutil
import pytest
from e2e.runs import ENVIRONMENT, brorl, rows, start, train, wait_for

from megatron_brorl.checkpoints import folders


def assert_same_run(directory, expected):
    assert rows(directory) == rows(expected)
    for name in ("model/model.safetensors", *(f"rollouts/{path.name}" for path in (expected / "rollouts").iterdir())):
        assert (directory / name).read_bytes() == (expected / name).read_bytes(), name


def test_resume_after_a_job_s_end_a_signal_and_a_kill_is_bit_exact(finished, config, warm, tmp_path):
    """SIGKILL ends one rank after a checkpoint and one more step; the launcher reports it and ends the other rank."""
    command = ("train", "--processes", "2", config, f"model.path={warm}", f"run.dir={tmp_path}")
    done = brorl(*command, SLURM_JOB_END_TIME="1")  # in 1970: no time for another step
    assert done.returncode == 75, done.stderr
    assert "the job ends at" in done.stdout + done.stderr
    assert len(rows(tmp_path)) == 1

    process = start(*command)
    wait_for(process, "train 2/8")
    process.send_signal(signal.SIGUSR1)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 75, output
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() != "step_00000001"

    process = start(*command)
    wait_for(process, "train 6/8")
    next(p for p in psutil.Process(process.pid).children() if f"run.dir={tmp_path}" in p.cmdline()).kill()
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + signal.SIGKILL
    assert "was ended by SIGKILL (out of memory?)" in output.splitlines()[-1]
    assert not (tmp_path / "summary.json").exists()
    assert "resumed from" in train(config, warm, tmp_path).stderr
    assert_same_run(tmp_path, finished[0])


def test_resume_with_critic_and_reference_resets_is_bit_exact(config, warm, tmp_path):
    """The checkpoint has a critic and a reference that was reset. Refills and shaping are on.

    dist/test_steps.py resumes partial rollouts and the critic in all layouts.
    """
    options = [
        *("algo.advantage=gae", "algo.kl_coef=0.01", "algo.kl_in=reward", "algo.kl_estimator=k1", "algo.epochs=2"),
        *("reference.reset_every=3", "rollout.refills=1", "rollout.n=8"),
        *("shaping.overlong_tokens=3", "shaping.repetition_ngram=2", "critic.lr=1e-3", "critic.warmup_steps=1"),
        "evaluate.every=0",
    ]
    for folder, steps in (("whole", 4), ("parts", 3), ("parts", 4)):
        train(config, warm, tmp_path / folder, *options, f"train.steps={steps}")
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    lines = rows(tmp_path / "whole")
    assert [row["reference_reset"] for row in lines] == [0, 0, 1, 0]
    assert lines[0]["updates"] == 0 < lines[0]["critic_updates"]
    assert len({row["prompts_sampled"] for row in lines}) > 1  # the size of a refill depends on the kept share


def test_a_resumed_run_may_change_the_learning_rate(config, warm, tmp_path):
    """The changes are logged once and recorded in run.json; metrics of earlier steps are kept."""
    options = ["evaluate.every=0", "optim.lr=1e-3", "train.steps=2"]
    train(config, warm, tmp_path, *options)
    before = rows(tmp_path)
    options += ["train.steps=4", "optim.lr=1e-4", "optim.lr_schedule=linear", "rollout.n=16"]
    done = train(config, warm, tmp_path, *options)
    assert done.stderr.count("optim.lr = 0.001 -> 0.0001") == 1
    assert "changed since that checkpoint: " in done.stderr
    lines = rows(tmp_path)
    assert lines[:2] == before
    # Each step has at most two updates. A step reports the rate of its last update: u of eight updates precede it.
    last = [int(sum(line["updates"] for line in lines[: i + 1])) - 1 for i in range(4)]
    assert 3 <= last[-1] <= 7
    expected = [1e-3, 1e-3, *(1e-4 * (1 - u / 8) for u in last[2:])]
    assert [line["lr"] for line in lines] == pytest.approx(expected)
    assert [line["rollouts"] for line in lines] == [6 * 32, 6 * 32, 6 * 16, 6 * 16]
    starts = json.loads((tmp_path / "run.json").read_text())["starts"]
    changes = {"optim.lr": [1e-3, 1e-4], "optim.lr_schedule": ["constant", "linear"]}
    changes |= {"rollout.n": [32, 16], "train.steps": [2, 4]}
    assert [start["changes"] for start in starts] == [{}, changes]


def test_a_finished_run_is_reported_and_left_unchanged(finished, config, warm, tmp_path):
    """The command reads no checkpoint, and neither the weights nor the tokenizer of the model."""
    directory = tmp_path / "run"
    shutil.copytree(finished[0], directory)
    for path in directory.rglob("*.distcp"):
        path.unlink()
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in directory.rglob("*")}
    command = ["train", "--processes", "2", config, f"model.path={warm}", f"run.dir={directory}"]
    done = brorl(*command)
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    for part in (str(directory), "steps: 8", "train.steps", "run.dir"):
        assert part in line
    assert {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in directory.rglob("*")} == before

    # More steps, or a missing plot, need the checkpoint.
    assert ".distcp is missing" in brorl(*command, "train.steps=9").stderr
    (directory / "curves.png").unlink()
    assert ".distcp is missing" in brorl(*command).stderr


def never_ends() -> None:
    while True:
        time.sleep(0.1)


def hanging(arguments: list[str]) -> None:
    """Run the command line; rank 1 hangs in make_experience of the second step, after a complete checkpoint."""
    from megatron_brorl.cli.main import main
    from megatron_brorl.train import trainer

    make_experience = trainer.make_experience
    calls = []

    def planted(*given):
        calls.append(1)
        if len(calls) == 2 and os.environ["RANK"] == "1":
            never_ends()
        return make_experience(*given)

    trainer.make_experience = planted
    save = trainer.Trainer.save
    trainer.Trainer.save = lambda self, new_best=None, in_background=False: save(self, new_best)
    main(arguments)


def test_a_hanging_rank_is_named_and_the_run_can_be_resumed(config, init, tmp_path, monkeypatch):
    monkeypatch.setattr(forks, "GRACE_S", 1.0)  # Rank 1 never ends.
    options = ["train.steps=2", "train.checkpoint_every=1"]
    options += ["evaluate.every=0", "data.held_out=[]", "rollout.n=8"]
    command = ["train", "--processes", "2", str(config), f"model.path={init}", f"run.dir={tmp_path}", *options]
    done = forks.command_line([*command, "parallel.timeout_s=8"], ENVIRONMENT, main=hanging)
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("brorl: ")]
    assert line.startswith("brorl: rank 0: waited for rank 1: dead or too slow")
    assert all(f"in {name}" in done.stderr for name in ("never_ends", "make_experience"))

    (saved,) = (tmp_path / "checkpoints").glob("step_*")
    assert folders.find_damage(saved) == ""
    assert "resumed from" in train(config, init, tmp_path, *options).stderr
    assert [row["step"] for row in rows(tmp_path)] == [0, 1]
