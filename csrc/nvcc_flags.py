"""Flags for compiling the .cu files, shared by setup.py and tests/ops/test_cuda_compiles.py.

The result has machine code for Ampere and Hopper, and PTX for later GPUs.
"""

from pathlib import Path

ARCHITECTURES = ("80", "90")
NVCC_FLAGS = [
    "-O3",
    "-std=c++17",
    f"-I{Path(__file__).parent}",
    "--compiler-options=-fPIC",
    "-Werror=all-warnings",
    *(f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES),
    f"-gencode=arch=compute_{ARCHITECTURES[-1]},code=compute_{ARCHITECTURES[-1]}",
]
