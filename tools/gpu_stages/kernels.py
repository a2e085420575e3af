"""(a) csrc's CUDA kernels: built for the torch that is here, tested, and each run under compute-sanitizer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from gpu_stages.common import ROOT, Job, Row, attempt, failed, has, judged, left_out, missing, ok

TORCH = ((2, 6), (2, 13))  # releases that csrc is made for, both included
OPS_ON_CPU = ["tests/ops/test_value_loss.py", "tests/ops/test_advantages.py"]  # of the dry mode


def run(job: Job) -> Iterator[Row]:
    """The rows of this stage."""
    nvcc = _cuda_program("nvcc")
    yield ok("nvcc", version=_release(nvcc)) if nvcc else missing("nvcc", "install the CUDA toolkit, or set CUDA_HOME")

    # The tests need the extension, and nobody else builds it.
    if job.dry:
        yield left_out("build of csrc with CUDA", "dry mode")
    else:
        yield attempt("build of csrc with CUDA", lambda: _build(nvcc))
    what = f"tests of the ops on {job.device}"
    yield attempt(what, lambda: _tests(what, job)) if has("pytest") else missing(what, "pip install pytest")


def _cuda_program(name: str) -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which(name, path=f"{home}/bin:{home}/compute-sanitizer:{os.environ['PATH']}")


def _release(nvcc: str) -> str:
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release ([\d.]+)", said)
    return found[1] if found else "unknown"


def _build(nvcc: str | None) -> Row:
    """`setup.py build_ext --inplace` with CUDA, for this processor; says what the build said where it fails."""
    import torch

    # What is here, before minutes are spent on it.
    what, torch_release = "build of csrc with CUDA", torch.__version__
    release = tuple(int(x) for x in torch_release.split(".")[:2])
    if not TORCH[0] <= release <= TORCH[1]:
        return failed(what, f"torch {torch_release} is not one of 2.6 to 2.13")
    if not nvcc:
        return missing(what, "nvcc")

    home = str(Path(nvcc).resolve().parents[1])
    environment = os.environ | {"BRORL_CUDA": "1", "BRORL_NATIVE": "1", "CUDA_HOME": home}
    environment.setdefault("MAX_JOBS", str(os.cpu_count() or 1))
    begun = time.perf_counter()
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    wrong = (done.stdout + done.stderr).strip()[-300:] if done.returncode else ""
    return judged(what, wrong, torch=torch_release, seconds=time.perf_counter() - begun)


def _tests(what: str, job: Job) -> Row:
    """pytest over the CUDA kernels' tests, or in the dry mode some of the same ops' on the CPU."""
    chosen = OPS_ON_CPU if job.dry else ["tests/gpu", "-k", "cuda"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]]
    count = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", said[-1])}

    # Tests that are skipped show nothing of a kernel.
    wrong = "" if not done.returncode and count.get("passed") else said[-1]
    return judged(what, wrong, passed=count.get("passed", 0), skipped=count.get("skipped", 0))
