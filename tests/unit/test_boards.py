"""Figures on their boards, each by its own library where that is installed; none of them needs a network here."""

from __future__ import annotations

import json
import sqlite3

import pytest

from megatron_brorl.boards import check_installed, open_boards, tag
from megatron_brorl.errors import UserError

CONFIG = {"rollout": {"n": 4}, "data": {"train": ("a.jsonl",)}}


def written(names, run_dir):
    """Three steps, and the last of them again with one more by a process that goes on."""
    for resume_step, steps in ((None, range(3)), (2, range(2, 4))):
        boards = open_boards(names, run_dir, resume_step, CONFIG)
        for step in steps:
            for board in boards:
                board.log(step, {tag("lr"): step / 8, tag("step", timed=True): 1.5})
        for board in boards:
            board.close()
    return json.loads((run_dir / ".boards.json").read_text())


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


def test_trackio(tmp_path, monkeypatch):
    pytest.importorskip("trackio.utils")
    for module in ("trackio.utils", "trackio.sqlite_storage"):
        monkeypatch.setattr(f"{module}.TRACKIO_DIR", tmp_path, raising=False)
    ids = written(["trackio"], tmp_path)
    with sqlite3.connect(tmp_path / "brorl.db") as base:
        rows = base.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert [(name, step, json.loads(figures)["policy/lr"]) for name, step, figures in rows] == [
        (ids["name"], step, step / 8) for step in (0, 1, 2, 2, 3)
    ]


def test_wandb(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = written(["wandb"], tmp_path)
    files = sorted(tmp_path.glob(f"wandb/offline-run-*/run-{ids['name']}.wandb"))
    assert len(files) == 2  # two processes, one run
    found = b"".join(file.read_bytes() for file in files)
    assert found.count(b"policy/lr") >= 5
    assert found.count(b"0.375") >= 1


def test_what_is_not_installed_is_told_before_anything_begins(monkeypatch):
    monkeypatch.setattr("megatron_brorl.boards.PACKAGES", {"wandb": "no_such_package", "tensorboard": "json"})
    check_installed(["tensorboard"])
    with pytest.raises(
        UserError, match=r'run\.log: "wandb" is not installed: pip install no_such_package, or leave it'
    ):
        check_installed(["tensorboard", "wandb"])


def test_a_board_that_cannot_be_opened_is_a_mistake_of_the_user(tmp_path):
    (tmp_path / "tensorboard").write_text("")  # where its folder should be
    with pytest.raises(UserError, match=r'run\.log: "tensorboard" cannot be opened: .*; mend it, or leave it out'):
        open_boards(["tensorboard"], tmp_path, None, {})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("reward", "reward/reward"),
        ("kept_share", "reward/kept_share"),
        ("rollouts", "rollout/rollouts"),
        ("response_tokens", "rollout/response_tokens"),
        ("logprob_gap_max", "engine/logprob_gap_max"),
        ("lr", "policy/lr"),
        ("updates_skipped", "policy/updates_skipped"),
        ("update_balance", "step/update_balance"),
        ("critic_lr", "critic/lr"),
        ("explained_variance", "critic/explained_variance"),
        ("pass_at_1_low", "evaluate/pass_at_1_low"),
        ("theory_measured/change", "theory/measured/change"),
        ("unheard_of", "step/unheard_of"),
    ],
)
def test_groups(name, expected):
    assert tag(name) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("generate", "time/generate"),
        ("ranks/train_idle", "ranks/train_idle"),
        ("throughput/mfu", "throughput/mfu"),
        ("kv_cache/peak", "kv_cache/peak"),
        ("unheard_of", "time/unheard_of"),
    ],
)
def test_groups_of_what_is_timed(name, expected):
    assert tag(name, timed=True) == expected
