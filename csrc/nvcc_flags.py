"""How the .cu files are compiled: setup.py and the compile test (tests/ops/test_cuda_compiles.py) share this.

Ampere and Hopper as machine code, and PTX of the latter for what comes after.
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
