"""Every kernel compiles with plain nvcc for each architecture, without spilling registers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from torch.utils import cpp_extension

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "csrc"))
from nvcc_flags import ARCHITECTURES, NVCC_FLAGS  # noqa: E402  also used by setup.py

CUDA_HOME = os.environ.get("CUDA_HOME", "/usr/local/cuda")
NVCC = shutil.which("nvcc", path=f"{CUDA_HOME}/bin:{os.environ['PATH']}")
CUBLAS = "common/gemm.cu"  # calls cuBLAS and has no kernel; its arithmetic is tested in test_cublas_gemm.py
SOURCES = sorted(p for p in (str(p.relative_to(ROOT / "csrc")) for p in (ROOT / "csrc").rglob("*.cu")) if p != CUBLAS)
REPORT = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@pytest.mark.slow
@pytest.mark.skipif(NVCC is None, reason="needs nvcc, of the CUDA toolkit")
@pytest.mark.parametrize("source", SOURCES)
def test_compiles_without_spills(source, tmp_path):
    command = [NVCC, *NVCC_FLAGS, "-Xptxas=-v", "-c", str(ROOT / "csrc" / source), "-o", str(tmp_path / "out.o")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    reports = {a: REPORT.findall(text) for a, text in _by_architecture(result.stderr).items()}
    assert reports.keys() == {f"sm_{a}" for a in ARCHITECTURES}
    for architecture, kernels in reports.items():
        assert kernels, f"{source}: ptxas reports no kernel for {architecture}"
        assert set(kernels) == {("0", "0", "0")}, f"{source} on {architecture}: {kernels}"


@pytest.mark.skipif(NVCC is None, reason="needs nvcc, of the CUDA toolkit")
@pytest.mark.skipif(not Path(CUDA_HOME, "include", "cublas_v2.h").is_file(), reason="this CUDA toolkit has no cuBLAS")
def test_cublas_call_compiles(tmp_path):
    command = [NVCC, *NVCC_FLAGS, "-c", str(ROOT / "csrc" / CUBLAS), "-o", str(tmp_path / "out.o")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@pytest.mark.skipif(NVCC is None, reason="needs the headers of the CUDA toolkit")
def test_torch_side_of_a_cuda_build_compiles():
    """Parse the files that depend on BRORL_CUDA, as one file, because torch's headers take most of the time.

    CPU wheels have torch's CUDA headers except cuda_cmake_macros.h.
    """
    sources = sorted(str(p) for p in (ROOT / "csrc").rglob("*.cpp") if "BRORL_CUDA" in p.read_text(encoding="utf-8"))
    text = "".join(f'#include "{source}"\n' for source in sources)
    defines = ["-DBRORL_CUDA=1", "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE", "-DTORCH_EXTENSION_NAME=_C"]
    defines += ['-DBRORL_PROCESSOR="x"', '-DBRORL_TORCH="x"']
    system = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"], f"{CUDA_HOME}/include"]
    include = [f"-I{ROOT / 'csrc'}", *(f"-isystem{p}" for p in system)]
    command = ["c++", "-std=c++20", "-fopenmp", "-fsyntax-only", "-Wno-psabi", *defines, *include, "-x", "c++", "-"]
    result = subprocess.run(command, input=text, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def _by_architecture(text: str) -> dict[str, str]:
    """Join the messages of ptxas per architecture; each kernel's begin "Compiling entry function ... for 'sm_90'"."""
    texts: dict[str, str] = {}
    for message in text.split("Compiling entry function")[1:]:
        name = re.search(r"for '(sm_\d+)'", message)
        assert name, message
        texts[name[1]] = texts.get(name[1], "") + message
    return texts
