"""Test tools/install.sh, setup.py and csrc/build_backend.py with fakes of Python, pip, torch and the CUDA toolkit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "csrc"))
import build_backend  # noqa: E402

# The interpreter of the variable PYTHON. It creates environments with the fake pip and torch below.
PYTHON = """#!/bin/bash
case "$*" in
  *version_info*) exit "${OLD:-0}" ;;
  --version) echo "Python 3.12.1" ;;
  *cuda.is_available*) [[ -n ${GPU:-} ]] ;;
  "-m venv"*)
    venv="${@: -1}"
    mkdir -p "$venv/bin" "$venv/site"
    cp "$STANDINS/pip" "$venv/bin/pip"
    cp -r "${REAL_PYTHON%/bin/*}"/lib/python3*/site-packages/tomli "$venv/site" 2>/dev/null # Python 3.10 lacks tomllib
    printf '#!/bin/bash\\nPYTHONPATH=%s exec %s -S "$@"\\n' "$venv/site" "$REAL_PYTHON" >"$venv/bin/python"
    chmod +x "$venv/bin/python"
    [[ $* == *system-site* && -n ${VISIBLE:-} ]] && "$STANDINS/torch" "$venv" 2.9.0 '"12.8"'
    echo "venv $*" >>"$LOG" ;;
  *) echo "unexpected: $*" >&2; exit 99 ;;
esac
"""
# REACHED: "up" if the CPU index answers. OWN: the torch of pip's own index, "cuda" (as on PyPI), "cpu" or none.
PIP = """#!/bin/bash
echo "pip BRORL_CUDA=${BRORL_CUDA-unset} $*" >>"$LOG"
venv="$(dirname "$(dirname "$0")")"
fail() { printf 'WARNING: one\\nERROR: %s\\n' "$1" >&2; exit 1; }
case "$*" in
  *--editable*) ;;
  *--index-url\\ https://download.pytorch.org/whl/cpu*)
    [[ ${REACHED:-} == up ]] || fail "the index does not answer"
    "$STANDINS/torch" "$venv" 2.13.0+cpu None ;;
  *torch==*)
    [[ -d $venv/site/torch && $* == *torch==$(cat "$venv/site/torch/full_version")* ]] && exit 0
    [[ ${OWN:-} == cpu ]] && exec "$STANDINS/torch" "$venv" 2.13.0+cpu None
    [[ ${OWN:-} == cuda && $* != *+cpu* ]] && exec "$STANDINS/torch" "$venv" 2.13.0 '"13.0"'
    fail "No matching distribution found" ;;
  *) fail "unexpected: $*" ;;
esac
"""
TORCH = """#!/bin/bash
rm -rf "$1"/site/torch*
mkdir -p "$1/site/torch" "$1/site/torch-$2.dist-info"
echo 'raise ImportError("its dependencies are not there yet")' >"$1/site/torch/__init__.py"
printf '__version__ = "%s"\\ncuda = %s\\n' "$2" "$3" >"$1/site/torch/version.py"
printf 'Metadata-Version: 2.1\\nName: torch\\nVersion: %s\\n' "$2" >"$1/site/torch-$2.dist-info/METADATA"
echo "$2" >"$1/site/torch/full_version"
echo "torch $2" >>"$LOG"
"""


@pytest.fixture
def install(tmp_path):
    """Return a function that runs the script and returns its process and its log of calls."""
    for name, text in {"python": PYTHON, "pip": PIP, "torch": TORCH}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (log := tmp_path / "log").touch()

    def run(*arguments: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("BRORL_", "PIP_"))}
        paths = {"PYTHON": tmp_path / "python", "VENV": tmp_path / "venv", "STANDINS": tmp_path, "LOG": log}
        env = inherited | {k: str(v) for k, v in paths.items()} | {"REAL_PYTHON": sys.executable} | variables
        script = ROOT / "tools" / "install.sh"
        process = subprocess.run(
            ["bash", script, *arguments], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        return process, log.read_text().splitlines()

    return run


def installed_torches(log: list[str]) -> list[str]:
    return [line.removeprefix("torch ") for line in log if line.startswith("torch ")]


def assert_refused(process: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert process.returncode == 2, process.stderr
    assert process.stderr.startswith("install: ")
    assert process.stderr.count("\n") == 1, process.stderr
    for part in parts:
        assert part in process.stderr


@pytest.mark.parametrize("machine", [{"REACHED": "up", "OWN": "cuda"}, {"OWN": "cpu"}], ids=["index", "pip's own"])
def test_without_cuda_the_cpu_build_is_installed_without_kernels(install, machine):
    process, log = install(**machine)
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    assert installed_torches(log) == ["2.13.0+cpu"]
    assert "--system-site-packages" not in log[0]
    with_dependencies = [line for line in log if "--no-deps" not in line and line.startswith("pip ")]
    assert len(with_dependencies) == 2
    assert all("torch==2.13.0+cpu" in line for line in with_dependencies)  # No other package may replace torch.
    assert log[-1].endswith("--no-build-isolation --no-deps --editable .")
    assert log[-1].startswith("pip BRORL_CUDA=0 ")


def test_a_cuda_build_is_refused_before_it_is_downloaded(install):
    """Without the CPU index, pip's own index would download a CUDA build of 4.7 GB."""
    process, log = install(OWN="cuda")
    assert_refused(process, "no torch==2.13.0+cpu for Python 3.12.1", "BRORL_TORCH", "PYTHON")
    assert installed_torches(log) == []
    assert not any("--editable" in line for line in log)


def test_with_cuda_the_installed_torch_is_kept(install):
    process, log = install(GPU="1", VISIBLE="1", OWN="cuda")
    assert process.returncode == 0, process.stderr
    assert installed_torches(log) == ["2.9.0"]  # visible in the environment
    assert "--system-site-packages" in "".join(log)
    assert "torch==2.9.0" in log[-2]
    assert log[-1].startswith("pip BRORL_CUDA=unset ")


def test_an_old_python_is_refused(install):
    process, _ = install(OLD="1")
    assert_refused(process, "Python 3.12.1 is too old")


# ---- setup.py


def setup(folder: Path, torch: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run setup.py without building. torch: the source of a fake torch."""
    for name, text in {
        "torch/__init__.py": torch,
        "torch/utils/__init__.py": "",
        "torch/utils/cpp_extension.py": "from setuptools import Extension as CppExtension\n"
        "from setuptools.command.build_ext import build_ext as BuildExtension\nCUDA_HOME = None\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("BRORL_") and k != "CUDA_HOME"}
    # Without bytecode, because the next fake may have the same size and time, and Python would then import this one.
    env = inherited | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"} | environment
    command = [sys.executable, "setup.py", "--name"]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


def fake_torch(cuda: str | None) -> str:
    return f"from types import SimpleNamespace\n__version__ = '2.9.1'\nversion = SimpleNamespace(cuda={cuda!r})\n"


@pytest.fixture
def toolkit(tmp_path):
    for name in ("bin/nvcc", "include/cublas_v2.h", "lib64/libcudart.so", "lib64/libcublas.so"):
        (tmp_path / "cuda" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cuda" / name).touch()
    return tmp_path / "cuda"


def test_kernels_are_built_with_a_complete_cuda_toolkit(toolkit, tmp_path):
    process = setup(tmp_path, fake_torch("12.8"), CUDA_HOME=str(toolkit))
    assert process.returncode == 0, process.stderr
    assert "setup.py: with CUDA kernels (BRORL_CUDA=1, default)" in process.stdout


@pytest.mark.parametrize("file", ["bin/nvcc", "lib64/libcudart.so"])
def test_a_missing_part_of_the_toolkit_is_named(toolkit, tmp_path, file):
    """Without this check, the linker fails with `cannot find -lcudart`."""
    (toolkit / file).unlink()
    process = setup(tmp_path, fake_torch("12.8"), CUDA_HOME=str(toolkit))
    assert process.returncode == 0, process.stderr
    assert f"without CUDA kernels: the CUDA toolkit in {toolkit} (CUDA_HOME) has no {Path(file).name}" in process.stdout
    process = setup(tmp_path, fake_torch("12.8"), CUDA_HOME=str(toolkit), BRORL_CUDA="1")
    assert process.returncode == 1
    assert process.stderr.count("\n") == 1, process.stderr
    assert f"BRORL_CUDA=1, but the CUDA toolkit in {toolkit} (CUDA_HOME) has no {Path(file).name}" in process.stderr


def test_cublas_from_pip_completes_a_toolkit_of_cuda_13(toolkit, tmp_path):
    for file, added in (("include/cublas_v2.h", "include/cublas_v2.h"), ("lib64/libcublas.so", "lib/libcublas.so.13")):
        (toolkit / file).unlink()
        wheel = tmp_path / "nvidia" / "cu13" / added
        wheel.parent.mkdir(parents=True, exist_ok=True)
        wheel.touch()
    process = setup(tmp_path, fake_torch("13.0"), CUDA_HOME=str(toolkit))
    assert "setup.py: with CUDA kernels (BRORL_CUDA=1, default)" in process.stdout, process.stdout + process.stderr
    process = setup(tmp_path, fake_torch("12.8"), CUDA_HOME=str(toolkit))
    assert "has no cublas_v2.h" in process.stdout


def test_building_without_torch_is_an_error_of_one_line(tmp_path):
    process = setup(tmp_path, "raise ImportError(\"No module named 'torch'\")")
    assert process.returncode == 1
    assert process.stderr.count("\n") == 1, process.stderr
    assert "needs torch" in process.stderr
    assert "--no-build-isolation" in process.stderr


# ---- csrc/build_backend.py


@pytest.mark.parametrize(("installed", "required"), [("2.9.0a0+nv25.9", []), ("", [build_backend.TORCH])])
def test_a_build_uses_the_torch_of_the_environment_or_requires_one(tmp_path, monkeypatch, installed, required):
    if installed:
        (tmp_path / f"torch-{installed}.dist-info").mkdir()
        (tmp_path / f"torch-{installed}.dist-info" / "METADATA").write_text(f"Name: torch\nVersion: {installed}\n")
    monkeypatch.setattr(build_backend, "folders", lambda: [str(tmp_path)])
    assert build_backend.get_requires_for_build_wheel() == required
    assert build_backend.get_requires_for_build_editable() == required

    # setup.py finds torch after the packages of the build environment.
    monkeypatch.setattr(sys, "path", ["build environment"])
    searched: list[str] = []
    monkeypatch.setattr(build_backend.build_meta, "build_wheel", lambda folder: searched.extend(sys.path) or folder)
    assert build_backend.build_wheel("dist") == "dist"
    assert searched == ["build environment", *([str(tmp_path)] if installed else [])]


def test_pip_and_make_install_the_same_torch():
    assert f"CPU_TORCH={build_backend.TORCH}+cpu" in (ROOT / "tools" / "install.sh").read_text()


# ---- sources without the extension


@pytest.mark.slow
def test_doctor_reports_sources_without_the_extension(tmp_path):
    """A checkout without a build may hide an installed package, because ranks import from the current folder."""
    sources = tmp_path / "checkout" / "megatron_brorl"
    shutil.copytree(ROOT / "megatron_brorl", sources, ignore=shutil.ignore_patterns("_C*.so", "__pycache__"))
    # -S disables the hook of an editable install. The packages of the environment are still needed.
    env = {**os.environ, "PYTHONPATH": sysconfig.get_paths()["purelib"]}
    command = [sys.executable, "-S", "-m", "megatron_brorl", "doctor"]
    process = subprocess.run(command, cwd=sources.parent, env=env, capture_output=True, text=True, timeout=120)
    assert process.returncode == 1, process.stderr
    (line,) = [line for line in process.stdout.splitlines() if " csrc " in line]
    assert line.split()[0] == "BAD"
    assert "start from another folder if the checkout hides an installed package" in line
