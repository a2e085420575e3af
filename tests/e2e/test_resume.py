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
from e2e.runs import ENVIRONMENT, brorl, metric_lines, reward_letters, rewind, start, train, wait_for

from megatron_brorl.checkpoints import folders


@pytest.fixture(scope="module")
def options(config):
    """Settings of a run whose random model gets rewards."""
    return [*reward_letters(config), "rollout.n=8", "train.steps=7", "evaluate.every=4", "evaluate.samples=1"]


@pytest.fixture(scope="module")
def undisturbed(config, init, options, tmp_path_factory):
    """The folder of an undisturbed run."""
    directory = tmp_path_factory.mktemp("runs") / "undisturbed"
    train(config, init, directory, *options)
    assert sum(line["updates"] for line in metric_lines(directory)) > 7
    return directory


def assert_same_run(directory, expected):
    assert metric_lines(directory) == metric_lines(expected)
    for name in ("model/model.safetensors", *(f"rollouts/{path.name}" for path in (expected / "rollouts").iterdir())):
        assert (directory / name).read_bytes() == (expected / name).read_bytes(), name


def test_resume_after_a_job_s_end_a_signal_and_a_kill_is_bit_exact(undisturbed, config, init, options, tmp_path):
    """SIGKILL ends one rank after a checkpoint and one more step; the launcher reports it and ends the other rank."""
    command = ("train", "--processes", "2", config, f"model.path={init}", f"run.dir={tmp_path}", *options)
    result = brorl(*command, SLURM_JOB_END_TIME="1")  # The job ends in 1970, which leaves no time for a second step.
    assert result.returncode == 75, result.stderr
    assert "the job ends at" in result.stdout + result.stderr
    assert len(metric_lines(tmp_path)) == 1

    process = start(*command)
    wait_for(process, "train 2/7")
    process.send_signal(signal.SIGUSR1)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 75, output
    saved = int((tmp_path / "checkpoints" / "latest").read_text().strip().removeprefix("step_"))
    assert 2 <= saved < 6

    process = start(*command)
    wait_for(process, f"train {saved + 1}/7")
    next(p for p in psutil.Process(process.pid).children() if f"run.dir={tmp_path}" in p.cmdline()).kill()
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + signal.SIGKILL
    assert "was ended by SIGKILL (out of memory?)" in output.splitlines()[-1]
    assert not (tmp_path / "summary.json").exists()
    assert "resumed from" in train(config, init, tmp_path, *options).stderr
    assert_same_run(tmp_path, undisturbed)
    starts = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert [begin["changes"] for begin in starts] == [{}] * 4


def test_resume_with_critic_and_reference_resets_is_bit_exact(config, init, options, tmp_path):
    """The checkpoint has a critic and a reference that was reset. Refills and shaping are on.

    dist/test_steps.py resumes partial rollouts and the critic in all layouts.
    """
    options = [
        *options,
        *("algo.advantage=gae", "algo.kl_coef=0.01", "algo.kl_in=reward", "algo.kl_estimator=k1", "algo.epochs=2"),
        *("reference.reset_every=2", "rollout.refills=1", "data.held_out=[]"),
        *("shaping.overlong_tokens=3", "shaping.repetition_ngram=2", "critic.lr=1e-3", "critic.warmup_steps=1"),
        *("train.steps=3", "train.checkpoint_every=2"),
    ]
    undisturbed, restarted = tmp_path / "undisturbed", tmp_path / "restarted"
    train(config, init, undisturbed, *options)
    shutil.copytree(undisturbed, restarted)
    rewind(restarted, step=2)
    assert "resumed from" in train(config, init, restarted, *options).stderr
    assert_same_run(restarted, undisturbed)
    lines = metric_lines(undisturbed)
    assert [row["reference_reset"] for row in lines] == [0, 1, 0]
    assert lines[0]["updates"] == 0
    assert lines[0]["critic_updates"] > 0


def test_a_finished_run_is_reported_and_left_unchanged(undisturbed, config, init, options, tmp_path):
    """The command reads no checkpoint, and neither the weights nor the tokenizer of the model."""
    directory = tmp_path / "run"
    shutil.copytree(undisturbed, directory)
    for path in directory.rglob("*.distcp"):
        path.unlink()
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in directory.rglob("*")}
    command = ["train", "--processes", "2", config, f"model.path={init}", f"run.dir={directory}", *options]
    result = brorl(*command)
    assert (result.returncode, result.stderr) == (0, "")
    (line,) = result.stdout.splitlines()
    assert all(text in line for text in (str(directory), "steps: 7", "train.steps", "run.dir"))
    assert {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in directory.rglob("*")} == before

    # More steps, or a missing plot, need the checkpoint.
    assert ".distcp is missing" in brorl(*command, "train.steps=8").stderr
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

    def make_experience_or_hang(*inputs):
        calls.append(inputs)
        if len(calls) == 2 and os.environ["RANK"] == "1":
            never_ends()
        return make_experience(*inputs)

    trainer.make_experience = make_experience_or_hang
    save = trainer.Trainer.save  # The replacement saves before it returns, not in the background.
    trainer.Trainer.save = lambda self, new_best=None, in_background=False: save(self, new_best)
    main(arguments)


def test_a_hanging_rank_is_named_and_the_run_can_be_resumed(config, init, tmp_path, monkeypatch):
    monkeypatch.setattr(forks, "GRACE_S", 1.0)  # Rank 1 never ends.
    options = ["train.steps=2", "train.checkpoint_every=1", "evaluate.every=0", "data.held_out=[]", "rollout.n=8"]
    command = ["train", "--processes", "2", str(config), f"model.path={init}", f"run.dir={tmp_path}", *options]
    result = forks.command_line([*command, "parallel.timeout_s=8"], ENVIRONMENT, main=hanging)
    assert result.returncode == 1, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("brorl: ")]
    assert line.startswith("brorl: rank 0: waited for rank 1: dead or too slow")
    assert "in never_ends" in result.stderr
    assert "in make_experience" in result.stderr

    (saved,) = (tmp_path / "checkpoints").glob("step_*")
    assert folders.find_damage(saved) == ""
    assert "resumed from" in train(config, init, tmp_path, *options).stderr
    assert [row["step"] for row in metric_lines(tmp_path)] == [0, 1]
