"""A rank that hangs ends the job: rank 0 names it, every rank prints its stacks, and the same command continues."""

from __future__ import annotations

import os

import forks
from e2e.runs import ENVIRONMENT, brorl, rows

from megatron_brorl.checkpoints import folders

STEPS = ["train.steps=2", "train.checkpoint_every=1", "train.checkpoint_async=false"]
SHORT = ["evaluate.every=0", "data.held_out=[]", "rollout.n=8"]


def never_ends() -> None:
    while True:
        pass


def hanging(arguments: list[str]) -> None:
    """The command line, in which rank 1 never leaves the second step's experience."""
    from megatron_brorl.cli.main import main
    from megatron_brorl.train import trainer

    make_experience, calls = trainer.make_experience, []

    def planted(*given):
        calls.append(1)
        if len(calls) == 2 and os.environ["RANK"] == "1":
            never_ends()
        return make_experience(*given)

    trainer.make_experience = planted
    main(arguments)


def test_a_rank_that_does_not_arrive_is_named_and_the_run_continues(config, init, tmp_path, monkeypatch):
    monkeypatch.setattr(forks, "LAST_WORDS_S", 1.0)  # Rank 1 would never end.
    command = ["train", "--processes", "2", str(config), f"model.path={init}", f"run.dir={tmp_path}", *STEPS, *SHORT]
    done = forks.command_line([*command, "parallel.timeout_s=8"], ENVIRONMENT, main=hanging)
    assert done.returncode == 1, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("brorl: ")]
    assert len(said) == 1, done.stderr
    assert said[0].startswith("brorl: rank 0: waited for rank 1: dead or too slow")
    assert "in never_ends" in done.stderr
    assert "in make_experience" in done.stderr

    (saved,) = (tmp_path / "checkpoints").glob("step_*")
    assert folders.find_damage(saved) == ""
    again = brorl(*command)
    assert again.returncode == 0, again.stderr
    assert "resumed from" in again.stderr
    assert [row["step"] for row in rows(tmp_path)] == [0, 1]
