"""Everything is declared in pyproject.toml; this file builds the extension megatron_brorl._C from csrc/.

It needs the torch that will be used at run time, so install with --no-build-isolation (tools/install.sh does).
BRORL_NATIVE=0 builds for any x86-64 or ARM processor instead of for this one. BRORL_CUDA=1 builds the CUDA kernels, 0
leaves them out; unset, they are built where torch has CUDA and a whole CUDA toolkit stands in CUDA_HOME.
BRORL_SANITIZE=1 builds for `make sanitize`.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from setuptools import setup

try:
    import torch
    from torch.utils.cpp_extension import CUDA_HOME as TORCH_CUDA_HOME
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError as error:
    raise SystemExit(
        f"setup.py: building megatron_brorl needs torch ({error}): install torch and setuptools, then pip install "
        "--no-build-isolation -e . (or use make, which does both)"
    ) from error

sys.path.insert(0, str(Path(__file__).parent / "csrc"))
from nvcc_flags import NVCC_FLAGS  # the compile test uses the same


def switch(name: str, default: bool, meaning: dict[bool, str]) -> bool:
    """An environment variable that is 0 or 1; prints what was chosen, because nothing else would show it."""
    text = os.environ.get(name, str(int(default)))
    if text not in ("0", "1"):
        raise SystemExit(f"setup.py: {name} is {text!r}; it takes 0 ({meaning[False]}) or 1 ({meaning[True]})")
    chosen = text == "1"
    origin = "set" if name in os.environ else "default"
    print(f"setup.py: {meaning[chosen]} ({name}={text}, {origin})")
    return chosen


# torch leaves its own unset where it was built without CUDA.
CUDA_HOME = os.environ.get("CUDA_HOME") or TORCH_CUDA_HOME
LIBRARY_FOLDERS = [Path(CUDA_HOME, x) for x in ("lib64", "lib") if Path(CUDA_HOME, x).is_dir()] if CUDA_HOME else []


def lack_of_cuda() -> str:
    """What the kernels lack to be built and used, in words; empty where nothing."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    if CUDA_HOME is None:
        return "there is no CUDA toolkit (CUDA_HOME is not set)"
    places = [Path(CUDA_HOME, "bin"), Path(CUDA_HOME, "include"), *LIBRARY_FOLDERS]
    for name in ("nvcc", "cublas_v2.h", "libcudart.so", "libcublas.so"):
        if not any((place / name).exists() for place in places):
            return f"the CUDA toolkit in {CUDA_HOME} (CUDA_HOME) has no {name}"
    return ""


LACK_OF_CUDA = lack_of_cuda()
NATIVE = switch("BRORL_NATIVE", True, {True: "CPU code for this processor", False: "CPU code for any processor"})
CUDA = switch(
    "BRORL_CUDA",
    not LACK_OF_CUDA,
    {True: "with CUDA kernels", False: f"without CUDA kernels{': ' * bool(LACK_OF_CUDA)}{LACK_OF_CUDA}"},
)
SANITIZE = switch("BRORL_SANITIZE", False, {True: "with sanitizers", False: "without sanitizers"})
if CUDA and LACK_OF_CUDA:
    raise SystemExit(f"setup.py: BRORL_CUDA=1, but {LACK_OF_CUDA}: install what is missing, or set BRORL_CUDA to 0")

# Contraction to fused multiply-adds is off by default under -std=c++17; math errno would keep loops scalar.
FLAGS = ["-O3", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wall"]
if NATIVE:
    FLAGS.append("-march=native")
    if platform.machine() == "x86_64":
        FLAGS.append("-mprefer-vector-width=512")  # compilers prefer 256, which costs the softmax passes a third
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g"] if SANITIZE else []


class Build(BuildExtension):
    """torch's build, with the .cu files compiled by plain nvcc beforehand: they include nothing of torch."""

    def build_extension(self, ext: Any) -> None:
        if CUDA:
            objects = Path(self.build_temp).absolute() / "cuda"
            objects.mkdir(parents=True, exist_ok=True)
            for source in sorted(Path("csrc").rglob("*.cu")):
                target = objects / f"{source.stem}.o"
                command = [f"{CUDA_HOME}/bin/nvcc", *NVCC_FLAGS, "-c", str(source), "-o", str(target)]
                print(" ".join(command))
                if subprocess.run(command).returncode:
                    raise SystemExit(f"setup.py: nvcc could not compile {source} (its messages are above)")
                ext.extra_objects.append(str(target))
        super().build_extension(ext)


setup(
    ext_modules=[
        CppExtension(
            "megatron_brorl._C",
            sorted(str(p) for p in Path("csrc").rglob("*.cpp")),
            depends=sorted(str(p) for p in (*Path("csrc").rglob("*.h"), *Path("csrc").rglob("*.cu"))),
            include_dirs=[str(Path(__file__).parent.absolute() / "csrc")],
            define_macros=[("BRORL_CUDA", "1")] if CUDA else [],
            library_dirs=[str(p) for p in LIBRARY_FOLDERS] if CUDA else [],
            libraries=["cudart", "cublas"] if CUDA else [],
            extra_compile_args=FLAGS + SANITIZERS,
            extra_link_args=["-fopenmp", *SANITIZERS],
        )
    ],
    cmdclass={"build_ext": Build},
)
