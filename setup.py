"""Everything is declared in pyproject.toml; this file builds the extension megatron_brorl._C from csrc/.

It needs the torch that will be used at run time, so install with --no-build-isolation (tools/install.sh does).
BRORL_NATIVE=0 builds for any x86-64 or ARM processor instead of for this one.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

from setuptools import setup

try:
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError as error:
    raise SystemExit(
        f"setup.py: building megatron_brorl needs torch ({error}): install torch and setuptools, then pip install "
        "--no-build-isolation -e . (or use make, which does both)"
    ) from error

NATIVE = os.environ.get("BRORL_NATIVE", "1")
if NATIVE not in ("0", "1"):
    raise SystemExit(f"setup.py: BRORL_NATIVE is {NATIVE!r}; it takes 0 (any processor) or 1 (this one)")
print(f"setup.py: CPU code for {'this' if NATIVE == '1' else 'any'} processor (BRORL_NATIVE={NATIVE})")

# Contraction to fused multiply-adds is off by default under -std=c++17; math errno would keep loops scalar.
FLAGS = ["-O3", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wall"]
if NATIVE == "1":
    FLAGS.append("-march=native")
    if platform.machine() == "x86_64":
        FLAGS.append("-mprefer-vector-width=512")  # compilers prefer 256, which costs the softmax passes a third

setup(
    ext_modules=[
        CppExtension(
            "megatron_brorl._C",
            sorted(str(p) for p in Path("csrc").glob("*.cpp")),
            depends=sorted(str(p) for p in Path("csrc").glob("*.h")),
            extra_compile_args=FLAGS,
            extra_link_args=["-fopenmp"],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
