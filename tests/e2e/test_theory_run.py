"""A run that watches itself: figures, measurement and rollout log, resumed bit for bit, and what reads them."""

from __future__ import annotations

import json

import metric_faults
import pytest
from e2e.runs import brorl, rows

from megatron_brorl.theory.log import read_log

OPTIONS = [
    *("theory.measure_every=2", "theory.measure_samples=16", "theory.prompts=4", "theory.log_rollouts=true"),
    *("evaluate.every=0", "train.steps=6"),
]


@pytest.fixture(scope="module")
def watched(config, warm, tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "watched"
    done = brorl(
        "train", "--processes", "2", config, f"model.path={warm}", f"run.dir={directory}", *OPTIONS, figures=True
    )
    assert done.returncode == 0, done.stderr
    return directory, done


def test_figures_summary_and_log(watched):
    directory, done = watched
    lines = rows(directory)
    trained = [line for line in lines if line["updates"]]
    assert len(trained) >= 4
    assert all(0 <= line["theory_exact/unsampled_mass"] <= 1 for line in trained)
    due = [line for line in trained if line["step"] % 2 == 0]
    for line in lines:
        measured = [key for key in line if key.startswith("theory_measured/")]
        assert bool(measured) == (line in due)
        if measured:
            change = line["theory_measured/after"] - line["theory_measured/before"]
            assert line["theory_measured/change"] == pytest.approx(change, abs=1e-12)
    assert any(line.get("theory_measured/change") for line in lines)
    summary = json.loads((directory / "summary.json").read_text())
    assert metric_faults.of_summary(summary) == []
    theory = summary["theory"]
    assert theory["steps"] == len(due) > 0
    assert set(theory["predictions"]) == {"theorem", "policy_gradient", "answers", "spread"}
    assert "predicted by theorem: correlation over steps" in done.stdout
    assert (directory / "theory.png").stat().st_size > 10_000
    groups = read_log(directory / "rollouts.jsonl")
    assert len(groups) == 6 * 6
    for step, line in enumerate(lines):
        mine = [g for g in groups if g.step == step]
        assert sum(g.n for g in mine) == line["rollouts"] <= 6 * 32
        assert sum(g.rewards.sum() for g in mine) / line["rollouts"] == pytest.approx(line["reward"])


def test_advise_reads_the_log(watched, tmp_path):
    done = brorl("advise", watched[0] / "rollouts.jsonl", "--resamples", "20", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "advice.json").read_text())["groups"] == 36


def test_resumed_bit_for_bit(watched, config, warm, tmp_path):
    command = ["train", "--processes", "2", config, f"model.path={warm}", f"run.dir={tmp_path}", *OPTIONS]
    for steps in (3, 6):
        done = brorl(*command, f"train.steps={steps}")
        assert done.returncode == 0, done.stderr
    assert rows(tmp_path) == rows(watched[0])
    for name in ("model/model.safetensors", "rollouts.jsonl"):
        assert (tmp_path / name).read_bytes() == (watched[0] / name).read_bytes()
