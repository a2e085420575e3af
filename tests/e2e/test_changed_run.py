"""A run that is resumed with other settings."""

from __future__ import annotations

import json

import pytest
from e2e.runs import brorl, rows


def test_a_resumed_run_may_change_the_learning_rate(config, warm, tmp_path):
    """Told once on the console and in run.json; the steps before are those of the first start."""
    command = ["train", "--processes", "2", config, f"model.path={warm}", f"run.dir={tmp_path}", "evaluate.every=0"]
    first = brorl(*command, "train.steps=2", "optim.lr=1e-3")
    assert first.returncode == 0, first.stderr
    before = rows(tmp_path)
    done = brorl(*command, "train.steps=4", "optim.lr=1e-4", "optim.lr_schedule=linear", "rollout.n=16")
    assert done.returncode == 0, done.stderr
    told = "optim.lr = 0.001 -> 0.0001"
    assert done.stderr.count(told) == 1
    assert "changed since that checkpoint: " in done.stderr
    lines = rows(tmp_path)
    assert lines[:2] == before
    # At most two updates in each of four steps: the rate of the last one of a step has u before it, of eight.
    taken = [int(sum(line["updates"] for line in lines[: i + 1])) - 1 for i in range(4)]
    assert 3 <= taken[-1] <= 7
    expected = [1e-3, 1e-3, *(1e-4 * (1 - u / 8) for u in taken[2:])]
    assert [line["lr"] for line in lines] == pytest.approx(expected)
    assert [line["rollouts"] for line in lines] == [6 * 32, 6 * 32, 6 * 16, 6 * 16]
    starts = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert [start["changes"] for start in starts] == [
        {},
        {
            "optim.lr": [1e-3, 1e-4],
            "optim.lr_schedule": ["constant", "linear"],
            "rollout.n": [32, 16],
            "train.steps": [2, 4],
        },
    ]
