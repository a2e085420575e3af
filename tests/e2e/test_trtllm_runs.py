"""Whole runs whose rollouts come from engine processes on the contract double of TensorRT-LLM."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.runs import REPOSITORY, brorl, make_model, rows
from safetensors.torch import load_file

DOUBLE = REPOSITORY / "tests" / "contract" / "double"
OPTIONS = ["rollout.engine=trtllm", "engine.cuda_graphs=false", "reward.strict=false"]
SHORT = ["train.steps=3", "train.checkpoint_every=0", "evaluate.every=0", "data.held_out=[]"]


def train(config: Path, model: Path, run_dir: Path, *options: str, processes: int = 2, **environment: str) -> Any:
    overrides = [f"model.path={model}", f"run.dir={run_dir}", *OPTIONS, *SHORT, *options]
    environment = {"PYTHONPATH": str(DOUBLE), **environment}
    done = brorl("train", "--processes", processes, config, *overrides, **environment)
    assert done.returncode == 0, done.stderr
    return done


def pids(run_dir: Path) -> list[str]:
    return sorted(p.name for p in (run_dir / "engines").iterdir())


def assert_same_runs(a: Path, b: Path) -> None:
    """The same rollouts and updates; log-probs may differ in their last bits, with the rows that share a batch."""
    for x, y in zip(rows(a), rows(b), strict=True):
        # What nobody knows is null in the file and listed beside, neither of which approx takes.
        assert x.pop("nonfinite", []) == y.pop("nonfinite", [])
        x, y = ({k: math.nan if v is None else v for k, v in row.items()} for row in (x, y))
        assert x == pytest.approx(y, rel=1e-3, abs=1e-4, nan_ok=True)
        assert x["reward"] == y["reward"]
    ours, theirs = (load_file(d / "model" / "model.safetensors") for d in (a, b))
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=2e-5, rtol=1e-3)


@pytest.fixture(scope="module")
def two_engines(config, warm, tmp_path_factory):
    """The run that nobody disturbs: two ranks, an engine process each."""
    directory = tmp_path_factory.mktemp("trtllm") / "two"
    train(config, warm, directory)
    return directory


def test_steps_with_an_engine_per_rank(two_engines, warm):
    lines = rows(two_engines)
    assert pids(two_engines) == ["rank_0.log", "rank_1.log"]
    assert [line["rollouts"] for line in lines] == [6 * 32] * 3
    assert sum(line["updates"] for line in lines) >= 3
    assert all(line["lost_share"] == 0 and line["refit_again"] == 0 for line in lines)
    assert all(line["logprob_gap_max"] <= 1e-4 for line in lines)
    trained, before = (load_file(d / "model.safetensors") for d in (two_engines / "model", warm))
    assert any(not torch.equal(tensor, before[name]) for name, tensor in trained.items())


def test_one_engine_for_two_ranks(two_engines, config, warm, tmp_path):
    train(config, warm, tmp_path, "engine.tensor=2")
    assert pids(tmp_path) == ["rank_0.log"]
    assert_same_runs(tmp_path, two_engines)


# test_trtllm_engine.py has an engine die at each of them.
@pytest.mark.parametrize("point", ["load:2", "row:150", "finish:3"])
def test_an_engine_killed_on_the_way_changes_nothing(point, two_engines, config, warm, tmp_path):
    flag = tmp_path / "died"
    done = train(config, warm, tmp_path / "run", BRORL_DOUBLE_DIE=f"{point}:{flag}")
    assert flag.exists()
    assert "ended (SIGKILL)" in done.stderr
    assert "restarting it" in done.stderr
    assert_same_runs(tmp_path / "run", two_engines)
    assert all(line["lost_share"] == 0 for line in rows(tmp_path / "run"))


def test_refit_under_tensor_and_pipeline_parallelism(config, tmp_path):
    """TP2 x PP2, two engines of two workers: after each refit the engines compute what the actor computes."""
    make_model(config, tmp_path / "init", "--heads", "4", "--kv-heads", "2")
    layout = ["parallel.tensor=2", "parallel.pipeline=2", "engine.tensor=2", "train.verify_reshard=always"]
    # The model has learnt nothing, not even to end; what moves it is the entropy.
    layout += ["reward.cut_off_factor=1.0", "algo.dynamic_sampling=false", "algo.entropy_coef=0.1"]
    train(config, tmp_path / "init", tmp_path / "run", *layout, processes=4)
    lines = rows(tmp_path / "run")
    assert pids(tmp_path / "run") == ["rank_0.log", "rank_2.log"]
    assert all(0 < line["reshard_gap_max"] <= 1e-4 for line in lines)
    assert sum(line["updates"] for line in lines) >= 1


def test_what_an_engine_cannot_do_ends_in_one_line(config, warm, tmp_path):
    command = ["train", config, f"model.path={warm}", f"run.dir={tmp_path}", *OPTIONS]
    for option, message in [
        ("rollout.stop_strings=['x']", "rollout.stop_strings"),
        ("engine.tensor=2", "engine.tensor = 2 does not divide the 1 ranks of a node"),
        ("engine.python=/nowhere", "engine.python = /nowhere: No such file or directory"),
    ]:
        done = brorl(*command, option, PYTHONPATH=str(DOUBLE))
        assert done.returncode == 2, done.stderr
        assert message in done.stderr
        assert done.stderr.strip().count("\n") == 0
