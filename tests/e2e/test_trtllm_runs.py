"""Whole runs with engine processes that use the fake TensorRT-LLM of tests/contract/double.

test_weight_sync_of_layouts.py compares the weights of engines and actor in all layouts, and test_shared_engine.py the
steps of ranks that share an engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.runs import REPOSITORY, brorl, metric_lines, reward_letters
from safetensors.torch import load_file

DOUBLE = REPOSITORY / "tests" / "contract" / "double"
OPTIONS = ["rollout.engine=trtllm", "engine.cuda_graphs=false"]
SHORT = ["train.steps=2", "train.checkpoint_every=0", "data.held_out=[]"]


def train(config: Path, model: Path, run_dir: Path, *options: str, processes: int = 2, **environment: str) -> Any:
    overrides = [f"model.path={model}", f"run.dir={run_dir}", *reward_letters(config), *OPTIONS, *SHORT, *options]
    environment = {"PYTHONPATH": str(DOUBLE), **environment}
    result = brorl("train", "--processes", processes, config, *overrides, **environment)
    assert result.returncode == 0, result.stderr
    return result


def pids(run_dir: Path) -> list[str]:
    return sorted(p.name for p in (run_dir / "engines").iterdir())


def assert_same_runs(run: Path, expected: Path) -> None:
    """Check for the same rollouts and updates. Log-probs may differ in the last bits, as batches are different."""
    for line, expected_line in zip(metric_lines(run), metric_lines(expected), strict=True):
        # Unknown values are null in the file and listed under "nonfinite"; pytest.approx accepts neither.
        assert line.pop("nonfinite", []) == expected_line.pop("nonfinite", [])
        known, expected_known = ({k: v for k, v in row.items() if v is not None} for row in (line, expected_line))
        assert known == pytest.approx(expected_known, rel=1e-3, abs=1e-4)
        assert line["reward"] == expected_line["reward"]
    weights, expected_weights = (load_file(folder / "model" / "model.safetensors") for folder in (run, expected))
    torch.testing.assert_close(weights, expected_weights, atol=2e-5, rtol=1e-3)


@pytest.fixture(scope="module")
def two_engines(config, init, tmp_path_factory):
    """An undisturbed run of two ranks with an engine process each."""
    directory = tmp_path_factory.mktemp("trtllm") / "two"
    train(config, init, directory)
    return directory


def test_steps_with_an_engine_per_rank(two_engines, init):
    lines = metric_lines(two_engines)
    assert pids(two_engines) == ["rank_0.log", "rank_1.log"]
    assert [line["rollouts"] for line in lines] == [6 * 32] * 2
    assert sum(line["updates"] for line in lines) >= 2
    assert all(line["lost_share"] == 0 and line["weight_sync_again"] == 0 for line in lines)
    assert all(line["logprob_gap_max"] <= 1e-4 for line in lines)
    trained, before = (load_file(folder / "model.safetensors") for folder in (two_engines / "model", init))
    assert any(not torch.equal(tensor, before[name]) for name, tensor in trained.items())


def test_a_killed_engine_changes_no_result(two_engines, config, init, tmp_path):
    """test_trtllm_engine.py kills an engine at each point."""
    flag = tmp_path / "died"
    result = train(config, init, tmp_path / "run", BRORL_DOUBLE_DIE=f"row:150:{flag}")
    assert flag.exists()
    assert "ended (SIGKILL)" in result.stderr
    assert "restarting it" in result.stderr
    assert_same_runs(tmp_path / "run", two_engines)
    assert all(line["lost_share"] == 0 for line in metric_lines(tmp_path / "run"))


def test_an_engine_that_does_not_fit_into_a_node_is_refused(config, init, tmp_path):
    command = ["train", config, f"model.path={init}", f"run.dir={tmp_path}", *OPTIONS]
    result = brorl(*command, "engine.tensor=2", PYTHONPATH=str(DOUBLE))
    assert (result.returncode, result.stderr.strip().count("\n")) == (2, 0), result.stderr
    assert "engine.tensor = 2 does not divide the 1 ranks of a node" in result.stderr
