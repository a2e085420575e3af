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
CASES = Path(__file__).with_name("kernel_cases.py")
TOOLS = ("memcheck", "racecheck")
FOUND = 86  # exit code for what a sanitizer finds


def run(job: Job) -> Iterator[Row]:
    """The rows of this stage."""
    nvcc, sanitizer = _cuda_program("nvcc"), _cuda_program("compute-sanitizer")
    yield ok("nvcc", version=_release(nvcc)) if nvcc else missing("nvcc", "install the CUDA toolkit, or set CUDA_HOME")
    if not sanitizer:
        yield missing("compute-sanitizer", "it comes with the CUDA toolkit")

    # The tests need the extension, and nobody else builds it.
    if job.dry:
        yield left_out("build of csrc with CUDA", "dry mode")
    else:
        yield attempt("build of csrc with CUDA", lambda: _build(nvcc))
    what = f"tests of the ops on {job.device}"
    yield attempt(what, lambda: _tests(what, job)) if has("pytest") else missing(what, "pip install pytest")

    # Sanitizers look at kernels alone, of which a CPU has none; the cases themselves are run in any case.
    yield attempt("one case of each kernel", lambda: _cases("one case of each kernel", [], job))
    for tool in TOOLS:
        if sanitizer and not job.dry:
            command = [sanitizer, "--tool", tool, "--kernel-name", "kns=brorl", "--error-exitcode", str(FOUND)]
            yield attempt(tool, lambda tool=tool, command=command: _cases(tool, command, job))  # type: ignore[misc]
        elif sanitizer:
            yield left_out(tool, "dry mode")


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


def _cases(what: str, under: list[str], job: Job) -> Row:
    """kernel_cases.py, which says the name of each case before it runs it; `under` stands before the command."""
    # Every tensor has an allocation of its own then, so that a sanitizer sees where it ends.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    begun = time.perf_counter()
    command = [*under, sys.executable, str(CASES), job.device]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    begun_cases = re.findall(r"^case (.+)$", done.stdout, re.M)

    said = [line for line in (done.stdout + done.stderr).splitlines() if "SUMMARY" in line]
    last = f" in {begun_cases[-1]}" if begun_cases else ""
    why = " ".join(said) or (done.stderr.strip().splitlines() or ["no output"])[-1]
    wrong = f"exit code {done.returncode}{last}: {why}" if done.returncode else ""
    figures = {"said": " ".join(said)} if said else {}
    return judged(what, wrong, cases=len(begun_cases), seconds=time.perf_counter() - begun, **figures)
