"""Every mistake of a user's ends in one line that says what and where, with exit code 2, and leaves nothing behind."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from e2e.runs import brorl, by_launcher

NO_FILES = ["data.train=[]", "data.held_out=[]"]
LINES = [
    '{"prompt": "1+1=", "answer": "2"}',
    '{"prompt": "1+2=", "answer": "3"}',
]


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


def test_unknown_key_is_told_once_by_the_launcher(config):
    fails(by_launcher("train", "--processes", "2", config, "rollout.nn=3"), "unknown key rollout.nn")


def test_missing_model(config, tmp_path):
    fails(train(config, tmp_path / "nowhere", tmp_path), "nowhere: no such Hugging Face directory")


def test_world_size_is_no_multiple(config, model, tmp_path):
    fails(
        train(config, model, tmp_path, "parallel.tensor=2"),
        "world size 1 is not a multiple of parallel.tensor x parallel.pipeline = 2 x 1",
    )


@pytest.mark.parametrize(
    ("third", "parts"),
    [
        ('{"prompt": "1+3=", "answer": ', ["JSON"]),
        ('["1+3=", "4"]', ["object"]),
        ('{"answer": "4"}', ["prompt"]),
        ('{"prompt": "1+3=", "answer": 4}', ["answer"]),
    ],
)
def test_malformed_row(config, model, tmp_path, third, parts):
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join([*LINES, third]) + "\n")
    done = train(config, model, tmp_path, f'data.train=["{data}"]')
    fails(done, f"{data}:3", *parts)


def test_supervised_training_that_diverges_exports_nothing(config, model, tmp_path):
    """No rate at all is told before anything is built; a far too high one where the loss shows it."""
    command = ("sft", config, f"model.path={model}", f"run.dir={tmp_path / 'run'}", "sft.steps=3")
    fails(brorl(*command, "sft.lr=inf"), "sft.lr = inf: must be finite")
    done = brorl(*command, "sft.lr=1e29")
    assert done.returncode == 2
    assert "nothing is exported" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "model").exists()


def test_a_second_run_in_the_same_directory(config, model, tmp_path):
    import fcntl

    (tmp_path / "run").mkdir()
    with open(tmp_path / "run" / ".lock", "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        run = f"run.dir={tmp_path / 'run'}"
        done = brorl("train", "--processes", "2", config, f"model.path={model}", run)
        fails(done, "another run is writing there")


def test_report_of_nothing(tmp_path):
    fails(brorl("report", tmp_path), "contains no metrics.jsonl")
