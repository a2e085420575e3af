"""Tests of the jobs of examples/slurm with a real Slurm on one node, if Debian's packages are installed."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.runs import REPOSITORY, example_script, rows
from slurm.one_node import OneNode, missing

SCRIPT = "examples/brorl_1.5b.sh"
TWO_RANKS = ("--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=f"no Slurm here ({missing()} missing)")]


@pytest.fixture(scope="module")
def slurm() -> Iterator[OneNode]:
    node = OneNode()
    try:
        yield node
    finally:
        node.close()


@pytest.fixture
def repository(tmp_path) -> Path:
    """A copy of the examples and tools, from which jobs are submitted. Runs are written to its folder runs."""
    for name in ("examples", "tools"):
        shutil.copytree(REPOSITORY / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def sbatch(slurm, repository) -> Callable[..., str]:
    """A function that submits a job of two ranks and returns its number. It also takes options of sbatch."""
    paths = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
    }

    def submit(*arguments: str) -> str:
        slurm.environment.update(paths)
        done = slurm.command(
            "sbatch", "--parsable", *TWO_RANKS, f"--output={repository}/output_%j", *arguments, cwd=repository
        )
        assert done.returncode == 0, f"{done.stderr}\n{output(repository)}"
        return done.stdout.strip()

    return submit


def output(repository: Path) -> str:
    return "\n".join(p.read_text() for p in repository.glob("output_*"))


def until(happened: Callable[[], Any], repository: Path, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, output(repository)
        time.sleep(0.5)


RANK = """
echo "$RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE here, $OMP_NUM_THREADS threads, end $SLURM_JOB_END_TIME"
[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || exit 75
"""


def test_run_sh_sets_the_environment_of_ranks_and_requeues(slurm, sbatch, repository):
    """The ranks are lines of bash that print their environment. The job's end equals the one of scontrol."""
    (repository / "rank").write_text(RANK)
    run = repository / "job"
    run.write_text('#!/usr/bin/env bash\nexec bash "$SLURM_SUBMIT_DIR/examples/slurm/run.sh" bash rank\n')
    job = sbatch("--exclusive", "--mem=0", "--time=1", "--requeue", "--open-mode=append", str(run))

    def state(name: str) -> str:
        shown = slurm.command("env", "SLURM_TIME_FORMAT=%s", "scontrol", "show", "job", job).stdout
        return next(word.partition("=")[2] for word in shown.split() if word.startswith(f"{name}="))

    # Both ranks exit with 75, and the job is requeued. Slurm starts it after two minutes, or when told to.
    until(lambda: state("Restarts") == "1", repository)
    slurm.command("scontrol", "update", f"JobId={job}", "StartTime=now", "TimeLimit=60")
    until(lambda: state("JobState") == "COMPLETED", repository)
    lines = output(repository).splitlines()
    ranks = [line.partition(", end ") for line in lines if ", end " in line]
    expected = [f"{rank} of 2, {rank} of 2 here, 1 threads" for rank in range(2)]
    assert sorted(rank for rank, _, _ in ranks[:2]) == sorted(rank for rank, _, _ in ranks[2:]) == expected
    begun = int(state("StartTime"))
    assert all(abs(int(end) - begun - 60 * 60) <= 2 for _, _, end in ranks[2:])
    assert f"run.sh: the state is saved; requeueing job {job}" in lines


@pytest.mark.parametrize("job", [SCRIPT, "examples/slurm/single_node.sbatch", "examples/slurm/multi_node.sbatch"])
def test_a_job_completes_a_step(job, sbatch, repository):
    sbatch("--wait", job, "--smoke", "run.dir=runs/smoke", "rollout.prompts=12")
    lines = rows(repository / "runs" / "smoke")
    assert len(lines) == 2
    assert sum(line["updates"] for line in lines) >= 1


def test_an_array_runs_every_seed_and_a_model_is_evaluated(sbatch, repository):
    sbatch("--wait", "--array=0-1", "examples/slurm/seeds.sbatch", "--smoke")
    runs = [repository / "runs" / f"brorl_1.5b_seed_{seed}" for seed in range(2)]
    assert [len(rows(run)) for run in runs] == [2, 2]
    assert rows(runs[0])[0]["reward"] != rows(runs[1])[0]["reward"]
    script = example_script()
    options = [*script.SMOKE_SIZES, *script.SMOKE_ON_A_CPU, f"model.path={runs[0] / 'model'}"]
    sbatch("--wait", "examples/slurm/evaluate.sbatch", *options, "run.dir=runs/evaluation")
    result = json.loads((repository / "runs" / "evaluation" / "evaluation.json").read_text())
    assert result["prompts"] == 16


def test_a_preempted_job_saves_and_is_resumed(slurm, sbatch, repository):
    """A job of a higher partition preempts it. The ranks save within the grace time of the partition."""
    run = repository / "runs" / "preempted"
    job = sbatch("examples/slurm/preemptible.sbatch", "--smoke", "run.dir=runs/preempted", "train.steps=5000")
    until(lambda: (run / "metrics.jsonl").exists() and rows(run), repository)
    sbatch("--wait", "--partition=high", "--wrap=true")
    state = slurm.command("scontrol", "show", "job", job).stdout
    assert "JobState=PENDING" in state
    assert "Restarts=1" in state
    assert "the state is saved; requeueing job" in output(repository)
    saved = len(rows(run))
    assert (run / "checkpoints" / "latest").read_text().strip() == f"step_{saved:08d}"
    slurm.command("scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm's delay is two minutes
    until(lambda: len(rows(run)) > saved, repository)
    assert "resumed from" in output(repository)
    slurm.command("scancel", job)
