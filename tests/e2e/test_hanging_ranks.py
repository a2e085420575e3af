"""A rank that hangs ends a job of two without a launcher: in one line that names it, with stacks, resumable."""

from __future__ import annotations

import ctypes
import os
import signal
import time

import forks
import pytest
from e2e.runs import ENVIRONMENT, brorl, rows

from megatron_brorl.checkpoints import folders
from megatron_brorl.timeline import span

# What is written meanwhile may not be there yet when a rank stops.
SAVED = ["train.checkpoint_every=1", "train.checkpoint_async=false"]
STEPS = ["train.steps=2", *SAVED, "evaluate.every=0", "data.held_out=[]", "rollout.n=8"]


def never_ends() -> None:
    while True:
        pass


def stops() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def keeps_the_interpreter() -> None:
    with span("waits", limit_s=300):  # its stacks are written no later for that
        time.sleep(1)
        ctypes.PyDLL(None).pause()


def hanging(what):
    """The command line, in which rank 1 does `what` instead of the second step's experience."""

    def run(arguments: list[str]) -> None:
        from megatron_brorl.cli.main import main
        from megatron_brorl.train import loop

        real, calls = loop.make_experience, []

        def planted(*given):
            calls.append(1)
            if len(calls) == 2 and os.environ["RANK"] == "1":
                what()
            return real(*given)

        loop.make_experience = planted
        main(arguments)

    return run


def loop_in_python(arguments: list[str]) -> None:
    hanging(never_ends)(arguments)


def stopped(arguments: list[str]) -> None:
    hanging(stops)(arguments)


def locked(arguments: list[str]) -> None:
    hanging(keeps_the_interpreter)(arguments)


# With the key whose time is up, how the line puts it, and the function that rank 1's stacks name.
OWN, LATE = ("run.progress_timeout_s", ["run.progress_timeout_s=3"]), ("parallel.timeout_s", ["parallel.timeout_s=5"])
CASES = [
    (loop_in_python, *OWN, "has come no further", "in never_ends"),
    (stopped, *OWN, "has not run", ""),  # nothing of it can write
    (locked, *OWN, "has not run", "in keeps_the_interpreter"),
    (loop_in_python, LATE[0], [*LATE[1], "run.progress_timeout_s=8"], "has come no further", "in never_ends"),
]


@pytest.mark.parametrize(("main", "key", "options", "how", "where"), CASES, ids=["loop", "stopped", "locked", "late"])
def test_it_is_named_and_the_run_goes_on(config, init, tmp_path, monkeypatch, main, key, options, how, where):
    if main is not loop_in_python:
        monkeypatch.setattr(forks, "LAST_WORDS_S", 1.0)  # it has none
    command = ["train", "--processes", "2", str(config), f"model.path={init}", f"run.dir={tmp_path}", *STEPS]
    done = forks.command_line([*command, *options], ENVIRONMENT, main=main)
    assert done.returncode == 1, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("brorl: ")]
    assert len(said) == 1, done.stderr
    assert said[0].startswith(f"brorl: rank 1 {how} for ")
    assert f"({key}): step 1, experience{' > waits' * (main is locked)}, and the others wait for it; see the" in said[0]
    assert "Traceback" not in done.stderr

    # What each rank was at.
    stacks = {path.name: path.read_text() for path in (tmp_path / "stacks").iterdir()}
    assert "in never_ends" not in stacks["rank_00000.txt"]
    assert "in make_experience" in stacks["rank_00000.txt"]
    assert where in stacks["rank_00001.txt"]
    assert bool(stacks["rank_00001.txt"]) == bool(where)

    # The first step's state is as it was saved, and the same command goes on from it.
    (saved,) = (tmp_path / "checkpoints").glob("step_*")
    assert folders.damage(saved) == ""
    if main is stopped:
        again = brorl(*command)
        assert again.returncode == 0, again.stderr
        assert "resumed from" in again.stderr
        assert [row["step"] for row in rows(tmp_path)] == [0, 1]
        assert not (tmp_path / ".progress").exists()


def stopped_while_it_draws(arguments: list[str]) -> None:
    """The command line, in which rank 0 stops when only its figures are left to be made."""
    from megatron_brorl.cli import report
    from megatron_brorl.cli.main import main

    report.show = lambda directory: stops()
    main(arguments)


def test_the_main_rank_that_hangs_after_the_last_step_is_seen_by_those_that_are_through(
    config, init, tmp_path, monkeypatch
):
    monkeypatch.setattr(forks, "LAST_WORDS_S", 1.0)
    command = ["train", "--processes", "2", str(config), f"model.path={init}", f"run.dir={tmp_path}", *STEPS]
    few = ["train.steps=1", "run.progress_timeout_s=3"]
    done = forks.command_line([*command, *few], ENVIRONMENT, main=stopped_while_it_draws)
    assert done.returncode == 1, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("brorl: ")]
    assert len(said) == 1, done.stderr
    assert said[0].startswith("brorl: rank 0 has not run for ")
    assert "(run.progress_timeout_s): step 0, report, and the others wait for it; see the" in said[0]

    # What the run came to is there, and the same command makes what is missing.
    assert (tmp_path / "model" / "model.safetensors").exists()
    again = brorl(*command, "train.steps=1")
    assert again.returncode == 0, again.stderr
    assert [row["step"] for row in rows(tmp_path)] == [0]
    assert not (tmp_path / ".progress").exists()
