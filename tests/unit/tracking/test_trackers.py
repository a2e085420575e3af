"""Test trackers with their own libraries if these are installed. No test needs a network."""

from __future__ import annotations

import json
import threading

import pytest

from megatron_brorl.errors import UserError
from megatron_brorl.tracking.trackers import check_installed, open_trackers, tag

CONFIG = {"rollout": {"n": 4}, "data": {"train": ("a.jsonl",)}}


def written(names, run_dir):
    """Log steps 0 to 2, resume at step 2, and log steps 2 and 3. Return the stored ids."""
    for resume_step, steps in ((None, range(3)), (2, range(2, 4))):
        trackers = open_trackers(names, run_dir, resume_step, CONFIG)
        for step in steps:
            for tracker in trackers:
                tracker.log(step, {tag("lr"): step / 8, tag("step", "time"): 1.5})
        for tracker in trackers:
            tracker.close()
    return json.loads((run_dir / ".trackers.json").read_text())


def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    ids = written(["mlflow"], tmp_path)
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("brorl").experiment_id])
    assert (run.info.run_id, run.info.run_name) == (ids["mlflow"], ids["name"])
    history = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "policy/lr")]
    assert history == [(0, 0.0), (1, 0.125), (2, 0.25), (2, 0.25), (3, 0.375)]
    assert run.data.params == {"rollout.n": "4", "data.train": "('a.jsonl',)"}


def test_wandb(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = written(["wandb"], tmp_path)
    files = sorted(tmp_path.glob(f"wandb/offline-run-*/run-{ids['name']}.wandb"))
    assert len(files) == 2  # two processes, one run
    content = b"".join(file.read_bytes() for file in files)
    assert content.count(b"policy/lr") >= 5  # 3 and 2 steps are logged
    assert b"0.375" in content


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "wandb" else name)
    check_installed(["tensorboard"])
    with pytest.raises(UserError, match=r'run\.log: "wandb" is not installed: pip install wandb, or leave it out'):
        check_installed(["tensorboard", "wandb"])


def test_a_tracker_that_cannot_be_opened_is_a_user_error(tmp_path):
    (tmp_path / "tensorboard").write_text("")  # a file instead of its folder
    with pytest.raises(UserError, match=r'run\.log: "tensorboard" cannot be opened: .*; fix that, or leave it out'):
        open_trackers(["tensorboard"], tmp_path, resume_step=None, config={})


def test_a_full_disk_ends_tensorboard_without_a_traceback(tmp_path, monkeypatch):
    printed = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    (tracker,) = open_trackers(["tensorboard"], tmp_path, resume_step=None, config={})
    (events,) = (tmp_path / "tensorboard").iterdir()
    events.unlink()
    events.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        tracker.log(1, {"reward/reward": 0.25})
    assert printed == []


def test_tags_begin_with_the_group():
    metrics = [tag(name) for name in ("reward", "lr", "critic_lr", "unknown")]
    assert metrics == ["reward/reward", "policy/lr", "critic/lr", "step/unknown"]
    times = [tag(name, "time") for name in ("generate", "ranks/train_idle", "unknown")]
    assert times == ["time/generate", "ranks/train_idle", "time/unknown"]
