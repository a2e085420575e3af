"""csrc's CUDA kernels without a GPU: the cases of tests/gpu, and kernels with planted faults.

Each file runs in its own process, because torch cannot unload a device. Objects are cached in build/emulation.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import forks
import pytest
from emulation import build

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler, c++"),
]


def cases(csrc: Path, file: str, *which: str) -> subprocess.CompletedProcess[str]:
    build.built(csrc)  # build here, where no test deadline applies
    return forks.script(HERE / "run_cases.py", csrc, f"tests/gpu/{file}", *which)


@pytest.mark.parametrize(
    "file",
    [
        "test_advantages_cuda.py",
        "test_value_loss_cuda.py",
        "test_uniforms_cuda.py",
        pytest.param("test_linear_ppo_loss_cuda.py", marks=pytest.mark.slow),
    ],
)
def test_gpu_cases_pass_on_emulated_kernels(file):
    done = cases(build.ROOT / "csrc", file)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    assert re.search(r"^\d+ passed(, \d+ warnings?)? in ", done.stdout, re.M), done.stdout[-5000:]


# The fault: file, text and its replacement; the case that must fail, and its message.
ROW_OF_WARPS = "  __syncthreads();\n  if (threadIdx.x == 0) {\n    for (int warp = 1;"
OF_WARP = "  if (threadIdx.x % kWarp == 0) of_warps"
LAST = "if (i < n) values[i] ="
FAULTS = {
    "a barrier removed": (
        *("policy/softmax.cu", ROW_OF_WARPS, ROW_OF_WARPS.replace("  __syncthreads();\n", "")),
        *("test_linear_ppo_loss_cuda.py", "test_every_term_agrees and settings1", "AssertionError"),
    ),
    "a barrier that some threads pass by": (
        *("policy/softmax.cu", ROW_OF_WARPS, ROW_OF_WARPS.replace("  __sync", "  if (threadIdx.x != 7) __sync")),
        *(
            "test_linear_ppo_loss_cuda.py",
            "test_every_term_agrees and settings1",
            "511 of 512 threads wait at a barrier",
        ),
    ),
    "an index off by one": (
        *("policy/softmax.cu", "x += of_warps[warp].x", "x += of_warps[warp + 1].x"),
        *("test_linear_ppo_loss_cuda.py", "test_every_term_agrees and settings1", "an index outside of an array"),
    ),
    "shared memory that is not written": (
        *("policy/partial_moments.h", OF_WARP, OF_WARP.replace("== 0", "== 0 && threadIdx.x < 7")),
        *("test_advantages_cuda.py", "test_moments and few", "AssertionError"),
    ),
    "an access after the last element": (
        *("policy/advantages.cu", LAST, LAST.replace("<", "<=")),
        *("test_advantages_cuda.py", "test_whiten and 21", "outside of any tensor"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_detected(name, tmp_path):
    source, text, instead, file, case, message = FAULTS[name]
    shutil.copytree(build.ROOT / "csrc", tmp_path / "csrc")
    path = tmp_path / "csrc" / source
    before = path.read_text(encoding="utf-8")
    assert before.count(text) == 1
    assert instead != text
    path.write_text(before.replace(text, instead), encoding="utf-8")
    done = cases(tmp_path / "csrc", file, "-k", case)
    assert done.returncode == 1, done.stdout[-5000:] + done.stderr
    assert message in done.stdout
