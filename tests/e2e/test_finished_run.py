"""A run that has finished and is started again: it says so at once, and goes on where there is more to do."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from e2e.runs import brorl, rows


@pytest.fixture(scope="module")
def finished(config, warm, tmp_path_factory):
    """A run of two steps that has come to its end."""
    directory = tmp_path_factory.mktemp("runs") / "whole"
    done = brorl("train", "--processes", "2", config, f"model.path={warm}", f"run.dir={directory}", "train.steps=2")
    assert done.returncode == 0, done.stderr
    return directory


def test_a_finished_run_says_so_and_touches_nothing(finished, config, warm, tmp_path):
    """The model is not needed for that: neither its weights nor its tokenizer are read."""
    directory = tmp_path / "run"
    shutil.copytree(finished, directory)
    for path in directory.rglob("*.distcp"):
        path.unlink()  # as good as a proof that no checkpoint is read
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in directory.rglob("*")}
    command = ["train", "--processes", "2", config, f"model.path={warm}", f"run.dir={directory}", "train.steps=2"]
    done = brorl(*command)
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    for part in (str(directory), "steps: 2", "train.steps", "run.dir"):
        assert part in line
    assert {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in directory.rglob("*")} == before

    # With more steps, and without a file of its end, the run is continued, which needs the checkpoint.
    assert ".distcp is missing" in brorl(*command, "train.steps=3").stderr
    (directory / "curves.png").unlink()
    assert ".distcp is missing" in brorl(*command).stderr


def test_a_finished_run_goes_on_with_more_steps(finished, config, warm, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    command = ["train", "--processes", "2", config, f"model.path={warm}", f"run.dir={tmp_path / 'run'}"]
    done = brorl(*command, "train.steps=3")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^train 3/3 .* step 2 ", done.stderr, re.M)
    assert rows(tmp_path / "run")[:2] == rows(finished)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 3
