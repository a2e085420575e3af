"""Every mistake of a user's ends in one line that says what and where, with exit code 2, and leaves nothing behind."""

from __future__ import annotations

import fcntl
import shutil
import subprocess

import pytest
from e2e.runs import brorl, start


def fails(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("brorl: ")
    for part in parts:
        assert part in done.stderr


@pytest.fixture
def model(init, tmp_path):
    """A copy of the random model to break."""
    return shutil.copytree(init, tmp_path / "model")


def train(config, model, tmp_path, *overrides):
    return brorl("train", config, f"model.path={model}", f"run.dir={tmp_path / 'run'}", *overrides)


def test_the_launcher_reports_an_unknown_key_once(config):
    run = start("train", "--processes", "2", config, "rollout.nn=3")
    output = run.communicate(timeout=60)[0]
    assert run.returncode == 2
    assert output.startswith("brorl: ")
    assert "unknown key rollout.nn" in output
    assert output.count("\n") == 1


def test_missing_model(config, tmp_path):
    fails(train(config, tmp_path / "nowhere", tmp_path), "nowhere: no such Hugging Face directory")


def test_malformed_row(config, model, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+3=", "answer": \n')
    fails(train(config, model, tmp_path, f'data.train=["{data}"]'), f"{data}:2", "JSON")


def test_supervised_training_that_diverges_exports_nothing(config, model, tmp_path):
    """No rate at all is told before anything is built; a far too high one where the loss shows it."""
    command = ("sft", config, f"model.path={model}", f"run.dir={tmp_path / 'run'}", "sft.steps=3")
    fails(brorl(*command, "sft.lr=inf"), "sft.lr = inf: must be a finite number")
    done = brorl(*command, "sft.lr=1e29")
    assert done.returncode == 2
    assert "nothing is exported" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "model").exists()


def test_a_second_run_in_the_same_directory(config, model, tmp_path):
    (tmp_path / "run").mkdir()
    with open(tmp_path / "run" / ".lock", "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        run = f"run.dir={tmp_path / 'run'}"
        done = brorl("train", "--processes", "2", config, f"model.path={model}", run)
        fails(done, "another run is writing there")


def test_report_of_nothing(tmp_path):
    fails(brorl("report", tmp_path), "contains no metrics.jsonl")
