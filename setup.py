"""Build the extension megatron_brorl._C from csrc/, and require the torch release that it is compiled against.

pyproject.toml declares everything else; csrc/build_backend.py provides torch in isolated builds. Environment variables:

    BRORL_NATIVE    1: CPU kernels for this processor only (used by make). 0 (default): for any processor; on x86-64,
                    three sets are built, and ops/fused/native.py loads the best one.
    BRORL_CUDA      1: build the CUDA kernels. 0: do not. Unset: build them if torch has CUDA and CUDA_HOME has nvcc.
                    cuBLAS may come from pip (nvidia/cu13).
    BRORL_SANITIZE  1: build for `make sanitize`.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from setuptools import setup

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

try:
    import torch
    from torch.utils.cpp_extension import CUDA_HOME as TORCH_CUDA_HOME
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError as error:
    raise SystemExit(
        f"setup.py: building megatron_brorl needs torch ({error}): use `pip install .`, which provides one, or with "
        "--no-build-isolation install torch, setuptools and ninja first"
    ) from error

sys.path.insert(0, str(Path(__file__).parent / "csrc"))
from nvcc_flags import NVCC_FLAGS  # shared with the compile test


def switch(name: str, default: bool, meaning: dict[bool, str]) -> bool:
    """Return the value of an environment variable that is 0 or 1, and print it for the build log."""
    text = os.environ.get(name, str(int(default)))
    if text not in ("0", "1"):
        raise SystemExit(f"setup.py: {name} is {text!r}; it takes 0 ({meaning[False]}) or 1 ({meaning[True]})")
    chosen = text == "1"
    origin = "set" if name in os.environ else "default"
    print(f"setup.py: {meaning[chosen]} ({name}={text}, {origin})")
    return chosen


# A torch without CUDA does not set its CUDA_HOME.
CUDA_HOME = os.environ.get("CUDA_HOME") or TORCH_CUDA_HOME


def cuda_folders(*names: str) -> list[Path]:
    """Return the existing folders of these names in the CUDA toolkit and in nvidia/cu13.

    nvidia/cu13 belongs to torch's wheels for CUDA 13. It has cuBLAS, which a toolkit may lack.
    """
    spec = importlib.util.find_spec("nvidia")
    packages = [Path(p, "cu13") for p in (spec.submodule_search_locations or ())] if spec else []
    homes = (
        [Path(CUDA_HOME), *(p for p in packages if (torch.version.cuda or "").startswith("13"))] if CUDA_HOME else []
    )
    return [home / name for home in homes for name in names if (home / name).is_dir()]


def cuda_library(name: str) -> str | None:
    """Return the path of a CUDA library, with a version suffix as in wheels (libcublas.so.13)."""
    folders = cuda_folders("lib64", "lib")
    return next((str(p) for folder in folders for p in sorted(folder.glob(f"{name}.so*"))), None)


def lack_of_cuda() -> str:
    """Return the reason why the CUDA kernels cannot be built, or ""."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    if CUDA_HOME is None:
        return "there is no CUDA toolkit (CUDA_HOME is not set)"
    if not Path(CUDA_HOME, "bin", "nvcc").exists():
        return f"the CUDA toolkit in {CUDA_HOME} (CUDA_HOME) has no nvcc"
    if not any(Path(folder, "cublas_v2.h").exists() for folder in cuda_folders("include")):
        return f"the CUDA toolkit in {CUDA_HOME} (CUDA_HOME) has no cublas_v2.h"
    for name in ("libcudart", "libcublas"):
        if cuda_library(name) is None:
            return f"the CUDA toolkit in {CUDA_HOME} (CUDA_HOME) has no {name}.so"
    return ""


LACK_OF_CUDA = lack_of_cuda()
NATIVE = switch("BRORL_NATIVE", False, {True: "CPU code for this processor", False: "CPU code for any processor"})
CUDA = switch(
    "BRORL_CUDA",
    not LACK_OF_CUDA,
    {True: "with CUDA kernels", False: f"without CUDA kernels{': ' * bool(LACK_OF_CUDA)}{LACK_OF_CUDA}"},
)
SANITIZE = switch("BRORL_SANITIZE", False, {True: "with sanitizers", False: "without sanitizers"})
if CUDA and LACK_OF_CUDA:
    raise SystemExit(f"setup.py: BRORL_CUDA=1, but {LACK_OF_CUDA}: install what is missing, or set BRORL_CUDA to 0")

CUDA_INCLUDES = cuda_folders("include") if CUDA else []
CUDA_LIBRARIES = [x for x in map(cuda_library, ("libcudart", "libcublas")) if CUDA and x]

# -std=c++17 disables contraction to fused multiply-adds by default. Math errno would prevent vectorisation. Python's
# own flags request debugging information, which would be 24 of 25 MB.
FLAGS = ["-O3", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wno-psabi"]
FLAGS += ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g"] if SANITIZE else ["-g0"]
WIDE = ["-mprefer-vector-width=512"]  # the default of 256 makes the softmax passes a third slower


def processors() -> dict[str, tuple[str, list[str]]]:
    """Return the processor and the flags of each module to build, by the suffix of its name."""
    x86 = platform.machine() == "x86_64"
    if NATIVE:
        return {"": ("this processor", ["-march=native", *(WIDE if x86 else [])])}
    if not x86:
        return {"": (f"any {platform.machine()}", [])}
    return {
        "": ("x86-64", []),
        "_v3": ("x86-64-v3", ["-march=x86-64-v3"]),
        "_v4": ("x86-64-v4", ["-march=x86-64-v4", *WIDE]),
    }


def extension(name: str, processor: str, flags: list[str]) -> Any:
    """Return the extension module of csrc/ for a processor."""
    macros = [("BRORL_PROCESSOR", f'"{processor}"'), ("BRORL_TORCH", f'"{TORCH_RELEASE}"')]
    return CppExtension(
        name,
        sorted(str(p) for p in Path("csrc").rglob("*.cpp")),
        depends=sorted(str(p) for p in (*Path("csrc").rglob("*.h"), *Path("csrc").rglob("*.cu"))),
        include_dirs=[str(Path(__file__).parent.absolute() / "csrc"), *(str(p) for p in CUDA_INCLUDES)],
        define_macros=[*macros, *([("BRORL_CUDA", "1")] if CUDA else [])],
        libraries=["c10_cuda"] if CUDA else [],
        extra_compile_args=FLAGS + flags,
        extra_link_args=["-fopenmp", *(x for x in FLAGS if x.startswith("-fsanitize")), *CUDA_LIBRARIES],
    )


class Build(BuildExtension):
    """Compile the .cu files by plain nvcc, because they do not include torch, and the rest by torch's build command."""

    def build_extensions(self) -> None:
        objects = [str(self.compiled(x)) for x in sorted(Path("csrc").rglob("*.cu"))] if CUDA else []
        for ext in self.extensions:
            ext.extra_objects += objects
        super().build_extensions()

        # Delete modules of an earlier in-place build, which would be loaded instead.
        built = {Path(self.get_ext_fullpath(ext.name)).name for ext in self.extensions}
        for old in Path("megatron_brorl").glob("_C*.so") if self.inplace else ():
            if old.name not in built:
                old.unlink()

    def build_extension(self, ext: Any) -> None:
        """Build a module in its own folder, because each module has its own flags."""
        shared, self.build_temp = self.build_temp, str(Path(self.build_temp, ext.name))
        super().build_extension(ext)
        self.build_temp = shared

    def compiled(self, source: Path) -> Path:
        """Compile a .cu file and return the path of the object file."""
        target = Path(self.build_temp).absolute() / "cuda" / f"{source.stem}.o"
        target.parent.mkdir(parents=True, exist_ok=True)
        include = [f"-I{p}" for p in CUDA_INCLUDES]
        command = [f"{CUDA_HOME}/bin/nvcc", *NVCC_FLAGS, *include, "-c", str(source), "-o", str(target)]
        print(" ".join(command))
        if subprocess.run(command).returncode:
            raise SystemExit(f"setup.py: nvcc could not compile {source} (its messages are above)")
        return target


TORCH_RELEASE = torch.__version__.split("+")[0]
DECLARED = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]["run"]

setup(
    install_requires=[f"torch=={TORCH_RELEASE}" if x.startswith("torch>") else x for x in DECLARED],
    ext_modules=[extension(f"megatron_brorl._C{end}", *settings) for end, settings in processors().items()],
    cmdclass={"build_ext": Build},
)
