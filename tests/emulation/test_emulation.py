"""csrc's CUDA kernels without a GPU: the cases of tests/gpu/test_ops_cuda.py.

They run in their own process, because torch cannot unload a device. Objects are cached in build/emulation.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import forks
import pytest
from emulation import build

HERE = Path(__file__).parent
pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler, c++")]


def test_gpu_cases_pass_on_emulated_kernels():
    build.built()  # build here, where no test deadline applies
    result = forks.script(HERE / "run_cases.py", "tests/gpu/test_ops_cuda.py")
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr
    assert re.search(r"^\d+ passed(, \d+ warnings?)? in ", result.stdout, re.M), result.stdout[-5000:]
