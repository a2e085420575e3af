"""Tests of the jobs of examples/slurm with a real Slurm on one node, if Debian's packages are installed."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forks
import pytest
from e2e.runs import MAKE_MODEL, REPOSITORY, SMALL_EXAMPLE, example_script, metric_lines
from slurm.one_node import OneNode, missing

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=f"no Slurm here ({missing()} missing)")]

SCRIPT = "examples/brorl_1.5b.sh"
CONFIG = "examples/brorl_1.5b.toml"
SINGLE_NODE = "examples/slurm/single_node.sbatch"
TWO_RANKS = ("--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1")
# Bash programs that print their names and arguments, in place of programs that a job starts.
PRINT = 'echo "${0##*/} $*"'
RANK = "$RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE here, $OMP_NUM_THREADS threads"
PRINT_RANK = f'echo "{RANK}: ${{0##*/}} $*"'
RANKS = [f"{rank} of 2, {rank} of 2 here, 1 threads" for rank in range(2)]


@pytest.fixture(scope="module")
def slurm() -> Iterator[OneNode]:
    node = OneNode()
    try:
        yield node
    finally:
        node.close()


@pytest.fixture
def repository(tmp_path) -> Path:
    """A copy of the examples, from which jobs are submitted. Runs are written to its folder runs."""
    shutil.copytree(REPOSITORY / "examples", tmp_path / "examples")
    return tmp_path


@pytest.fixture
def sbatch(slurm, repository) -> Callable[..., str]:
    """A function that submits a job and returns its number. programs: bash programs, first in the PATH of the job."""

    def submit(*arguments: str, programs: dict[str, str] | None = None, **environment: str) -> str:
        for name, text in (programs or {}).items():
            program = repository / "bin" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(f"#!/usr/bin/env bash\n{text}\n")
            program.chmod(0o755)
        path = f"{repository / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        variables = {"PATH": path, "PYTHONPATH": REPOSITORY, "OMP_NUM_THREADS": "1", **environment}
        command = ["sbatch", "--parsable", f"--output={repository}/output_%j", *arguments]
        result = slurm.command("env", *(f"{key}={value}" for key, value in variables.items()), *command, cwd=repository)
        assert result.returncode == 0, f"{result.stderr}\n{output(repository)}"
        return result.stdout.strip()

    return submit


@pytest.fixture
def run_job(slurm, sbatch, repository) -> Callable[..., str]:
    """A function that submits a job, waits until it has ended, and returns its number."""

    def run(*arguments: str, **options: Any) -> str:
        job = sbatch(*arguments, **options)
        until(lambda: not slurm.command("squeue", "--noheader", f"--jobs={job}").stdout, repository)
        return job

    return run


def output(repository: Path) -> str:
    return "\n".join(p.read_text() for p in repository.glob("output_*"))


def start_soon(slurm: OneNode, job: str, *changes: str) -> None:
    """Start a requeued job in three seconds, not in two minutes, but after the second that revokes its credential."""
    slurm.command("scontrol", "update", f"JobId={job}", "StartTime=now+3", *changes)


def until(happened: Callable[[], Any], repository: Path, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, output(repository)
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("job", "nodes", "commands"),
    [
        (SCRIPT, 8, ["optim.lr=1e-6"]),
        (SINGLE_NODE, 1, ["rollout.prompts=16 optim.lr=1e-6"]),
        ("examples/slurm/multi_node.sbatch", 8, ["optim.lr=1e-6"]),
        ("examples/slurm/preemptible.sbatch", 8, ["train.checkpoint_every=1 optim.lr=1e-6"]),
        (
            "examples/slurm/seeds.sbatch",
            8,
            [f"run.dir=runs/brorl_1.5b_seed_{seed} optim.lr=1e-6 run.seed={seed}" for seed in range(4)],
        ),
        ("examples/slurm/evaluate.sbatch", 1, [f"evaluate {CONFIG} run.dir=runs/brorl_1.5b_evaluation optim.lr=1e-6"]),
    ],
)
def test_a_job_requests_the_resources_of_its_ranks_and_starts_them(
    job, nodes, commands, slurm, sbatch, run_job, repository
):
    """The job is submitted to a cluster whose nodes are down, and then with two ranks, which print their command."""
    waiting = sbatch("--partition=cluster", job)
    fields = slurm.job(waiting)
    slurm.command("scancel", waiting)
    assert (fields["NumNodes"], fields["NumTasks"], fields["CPUs/Task"]) == (f"{nodes}-{nodes}", f"{8 * nodes}", "12")
    assert (fields["TresPerNode"], fields["MinMemoryNode"], fields["OverSubscribe"]) == ("gres:gpu:8", "0", "NO")
    assert fields["Requeue"] == "1"

    run_job(*TWO_RANKS, job, "optim.lr=1e-6", programs={"python": PRINT_RANK, "brorl": PRINT_RANK})
    program = "brorl" if "evaluate" in job else f"python {repository / SCRIPT}"
    expected = [f"{rank}: {program} {command}" for rank in RANKS for command in commands]
    assert sorted(filter(None, output(repository).splitlines())) == sorted(expected)


def test_a_job_whose_ranks_have_saved_is_requeued(slurm, sbatch, repository):
    """The ranks exit with 75 at the first start. They know when the job ends, as scontrol does."""
    rank = f'echo "{RANK}, end $SLURM_JOB_END_TIME"\n[ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ] || exit 75'
    job = sbatch("--time=1", *TWO_RANKS, SINGLE_NODE, programs={"python": rank})
    until(lambda: (slurm.job(job)["JobState"], slurm.job(job)["Restarts"]) == ("PENDING", "1"), repository)
    start_soon(slurm, job, "TimeLimit=60")
    until(lambda: slurm.job(job)["JobState"] in ("COMPLETED", "FAILED"), repository)
    lines = output(repository).splitlines()
    assert f"run.sh: the state is saved; requeueing job {job}" in lines
    ranks = [line.partition(", end ") for line in lines if ", end " in line]
    assert sorted(rank for rank, _, _ in ranks[:2]) == sorted(rank for rank, _, _ in ranks[2:]) == RANKS
    end = int(slurm.job(job)["StartTime"]) + 60 * 60  # TimeLimit=60 is in minutes
    assert all(abs(int(rank_end) - end) <= 2 for _, _, rank_end in ranks[2:])


def test_a_job_in_a_container(run_job, repository):
    """pyxis and apptainer mount the folder of the job under its own path. CONTAINER_MOUNTS adds two for apptainer."""
    command = f"python {repository / SCRIPT} rollout.prompts=16"
    folder = f"{repository}:{repository}"
    mounts = "/data:/data,/models:/m:ro"
    step = "--kill-on-bad-exit=0 --wait=900 --exclusive --mem=0 --cpus-per-task=1"
    pyxis = f"--container-image=x.sif --container-mounts={folder} --container-workdir={repository}"
    rank = f"bash {repository}/examples/slurm/rank.sh"
    apptainer = f"apptainer exec --nv --bind {folder},{mounts} --pwd {repository} x.sif {command}"
    for container, program, extra_mounts, expected in (
        # Debian has no pyxis, which adds options to srun.
        ("pyxis", "srun", "", [f"srun {step} {pyxis} {rank} {command}"]),
        ("apptainer", "apptainer", mounts, [apptainer] * 2),
    ):
        settings = {"CONTAINER": container, "CONTAINER_IMAGE": "x.sif", "CONTAINER_MOUNTS": extra_mounts}
        job = run_job(*TWO_RANKS, SINGLE_NODE, programs={program: PRINT}, **settings)
        assert (repository / f"output_{job}").read_text().splitlines() == expected
        (repository / "bin" / program).unlink()


def test_an_incomplete_container_setting_is_refused(sbatch, slurm, repository):
    for container, image in (("podman", "x"), ("pyxis", ""), ("", "x.sif")):
        job = sbatch(*TWO_RANKS, SINGLE_NODE, CONTAINER=container, CONTAINER_IMAGE=image)
        until(lambda job=job: slurm.job(job)["JobState"] == "FAILED", repository)
        assert slurm.job(job)["ExitCode"] == "2:0"
        assert f"run.sh: CONTAINER={container} CONTAINER_IMAGE={image}: give both" in output(repository)


def test_a_preempted_job_saves_and_is_resumed(slurm, sbatch, run_job, repository):
    """A job of a higher partition preempts it. The ranks save within the grace time of the partition.

    The resumed job is cancelled. Its ranks save again, but it is not requeued.
    """
    run = repository / "runs" / "preempted"
    example = example_script()
    result = forks.script(MAKE_MODEL, example.CONFIG, f"{run}_model", *example.SHAPE, "--chat")
    assert result.returncode == 0, result.stderr
    options = ("run.dir=runs/preempted", "algo.dynamic_sampling=false", "rollout.refills=0", "train.steps=5000")
    job = sbatch(*TWO_RANKS, "examples/slurm/preemptible.sbatch", "--smoke", *SMALL_EXAMPLE, *options)
    metrics = run / "metrics.jsonl"
    until(lambda: slurm.job(job)["JobState"] == "FAILED" or (metrics.exists() and metric_lines(run)), repository)
    run_job("--partition=high", "--wrap=true")
    assert (slurm.job(job)["JobState"], slurm.job(job)["Restarts"]) == ("PENDING", "1")
    assert "the state is saved; requeueing job" in output(repository)
    saved = len(metric_lines(run))
    assert (run / "checkpoints" / "latest").read_text().strip() == f"step_{saved:08d}"
    start_soon(slurm, job)
    until(lambda: len(metric_lines(run)) > saved, repository)
    assert "resumed from" in output(repository)
    slurm.command("scancel", job)
    until(lambda: not slurm.command("squeue", "--noheader").stdout, repository)
    assert (slurm.job(job)["JobState"], slurm.job(job)["Restarts"]) == ("CANCELLED", "1")
