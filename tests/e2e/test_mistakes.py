"""User errors end with exit code 2 and one line that names the cause and the place."""

from __future__ import annotations

import fcntl
import shutil
import subprocess

import pytest
from e2e.runs import brorl, start


def assert_refused(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("brorl: ")
    for part in parts:
        assert part in done.stderr


@pytest.fixture
def model(init, tmp_path):
    """A copy of the random model that a test may change."""
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


def test_a_loss_that_fails_on_the_last_stage_is_reported_by_its_rank(config, model, tmp_path):
    """The other stage does not call the loss. The trial call before the run has six tokens."""
    file = tmp_path / "mine.py"
    file.write_text("def loss(log_probs, **_):\n    return -log_probs if len(log_probs) == 6 else log_probs[1:]\n")
    options = ("--processes", 2, "parallel.pipeline=2", "algo.dynamic_sampling=false", f"algo.policy_loss={file}:loss")
    done = train(config, model, tmp_path, *options)
    assert done.returncode in (1, 2)
    (line,) = [line for line in done.stderr.splitlines() if "mine.py" in line]
    assert line.startswith(f"brorl: algo.policy_loss = {file}:loss: returned torch.float32 [")
    assert "Traceback" not in done.stderr


def test_missing_model(config, tmp_path):
    assert_refused(train(config, tmp_path / "nowhere", tmp_path), "nowhere: no such Hugging Face directory")


def test_malformed_row(config, model, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+3=", "answer": \n')
    assert_refused(train(config, model, tmp_path, f'data.train=["{data}"]'), f"{data}:2", "JSON")


def test_supervised_training_that_diverges_exports_nothing(config, model, tmp_path):
    """An infinite learning rate is refused at the start; one that is far too high ends the run by its loss."""
    command = ("sft", config, f"model.path={model}", f"run.dir={tmp_path / 'run'}", "sft.steps=3")
    assert_refused(brorl(*command, "sft.lr=inf"), "sft.lr = inf: must be a finite number")
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
        assert_refused(done, "another run is writing there")


def test_report_of_an_empty_folder(tmp_path):
    assert_refused(brorl("report", tmp_path), "contains no metrics.jsonl")
