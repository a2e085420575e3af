"""A study from its design to its page, with an arm that starts from another arm's model, tuning, and a restart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import study
from e2e.runs import brorl

from megatron_brorl.errors import UserError

SHORT = {"rollout.n": 8, "rollout.prompts": 2, "algo.mini_batches": 1, "evaluate.every": 1, "evaluate.samples": 2}


def forked(command, stdout=None, **_):
    assert command[:2] == ["taskset", "-c"]
    assert command[3:6] == [sys.executable, "-m", "megatron_brorl"]
    result = brorl(*command[6:])
    stdout.write(result.stdout + result.stderr)
    return result


def test_the_example_design_with_two_steps_per_run(tmp_path, config, init, monkeypatch):
    declared = study.tomllib.loads(Path(study.__file__).with_name("study_example.toml").read_text())
    declared |= {"config": str(config), "processes": 1, "seeds": [1]}
    declared["settings"] = {"model.path": str(init), "train.checkpoint_every": 0}
    declared["tuning"] = {"seeds": [9], "rates": [1e-3]}
    declared["arms"] = [
        {"name": arm["name"], "start": arm.get("start", ""), "rollouts": 32, "settings": SHORT}
        for arm in declared["arms"][:2]
    ]
    declared["comparisons"] = [{"claim": "it gains", "before": "plateau", "after": "n16", "over": "rollouts"}]
    example = study.Study(study.Design(**declared), tmp_path / "study")
    example.write_design()
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", forked)
        example.execute()

    # A tuning run and a test run of each arm, two steps of 16 rollouts each.
    page = study.write_page(example)
    results = pd.read_parquet(tmp_path / "study/results.parquet")
    assert sorted(results.run.unique()) == [
        f"{arm}-seed{seed}-lr0.001" for arm in ("n16", "plateau") for seed in (1, 9)
    ]
    assert results.groupby("run").rollouts.max().tolist() == [32] * 4
    assert results.groupby("run").steps.max().tolist() == [2] * 4
    assert example.sha256 in page.read_text()
    assert "it gains" in page.read_text()

    # The second arm starts from the first one's model.
    started = json.loads((tmp_path / "study/runs/n16-seed1-lr0.001/run.json").read_text())
    assert started["config"]["model"]["path"] == str(tmp_path / "study/runs/plateau-seed1-lr0.001/model")

    # Runs that are done are not repeated, and another design is refused.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "study/runs").rglob("summary.json")}
    example.execute()
    assert {path: path.stat().st_mtime_ns for path in before} == before
    with pytest.raises(UserError, match="the design has changed"):
        study.Study(study.Design(**{**declared, "seeds": [1, 2]}), tmp_path / "study").write_design()
