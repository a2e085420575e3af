"""Compile and load the emulation, which gives torch a device "emulated" that runs csrc's .cu files.

It cannot be unloaded, so tests load it in their own process.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import subprocess
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils import cpp_extension

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DEVICE = "emulated"
CSRC = ROOT / "csrc"
ENVIRONMENT_VARIABLE = "BRORL_EMULATED"  # set if tests/gpu runs the kernels without a GPU
CHUNK_ROWS = 64  # rows of logits per chunk; so few that a hundred rows need two chunks
NOT_EMULATED = "common/gemm.cu"  # calls cuBLAS
# A fortified longjmp, the default of some compilers, refuses to switch stacks.
FLAGS = ["-std=c++17", "-fPIC", "-w", "-Wno-psabi", "-U_FORTIFY_SOURCE"]
CHECKS = ["-fsanitize=thread,bounds", "--param=tsan-instrument-func-entry-exit=0"]  # loads and stores call memory.cpp
TORCH_SOURCES = ["device.cpp", "ops.cpp"]  # They include torch's headers and compile faster without -O2.


def _compiled(source: Path, folder: Path) -> Path:
    """Return the object of one source. It is cached under a hash of its text and all headers."""
    # Fake CUDA headers come before csrc. Kernels are compiled without torch's headers, as by nvcc.
    kernel = source.suffix == ".cu"
    uses_torch = source.name in TORCH_SOURCES
    include = [f"-I{HERE / 'stand_in'}"]
    include += [f"-isystem{p}" for p in cpp_extension.include_paths()] if uses_torch else []
    options = ["-O0", "-fopenmp", "-DBRORL_CUDA=1"] if uses_torch else ["-O2", *(CHECKS if kernel else [])]
    flags = [*FLAGS, *options, *include, f"-I{HERE}", f"-I{CSRC}"]

    csrc_files = [*CSRC.rglob("*.h"), *(CSRC.rglob("*.cpp") if uses_torch else [])]
    headers = sorted([*HERE.rglob("*.h"), *(csrc_files if kernel or source.name == "ops.cpp" else [])])
    inputs = [*FLAGS, *options, torch.__version__, source.name, source.read_text(encoding="utf-8")]
    key = hashlib.sha256("\0".join([*inputs, *(p.read_text(encoding="utf-8") for p in headers)]).encode()).hexdigest()
    target = folder / f"{source.stem}-{key[:16]}.o"
    if not target.exists():
        unfinished = target.with_suffix(".part")
        subprocess.run(["c++", *flags, "-x", "c++", "-c", str(source), "-o", str(unfinished)], check=True)
        unfinished.rename(target)
    return target


def built() -> Path:
    """Compile the emulation with the kernels of csrc, unless it is cached, and return its library."""
    folder = ROOT / "build" / "emulation"
    folder.mkdir(parents=True, exist_ok=True)
    kernels = [p for p in sorted(CSRC.rglob("*.cu")) if str(p.relative_to(CSRC)) != NOT_EMULATED]
    with (folder / "lock").open("w") as lock, ThreadPoolExecutor(2) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other test processes may build at the same time
        # Of a function in two objects the linker takes the first, so the instrumented kernels come first.
        objects = list(pool.map(lambda p: _compiled(p, folder), [*kernels, *sorted(HERE.glob("*.cpp"))]))
        key = hashlib.sha256("\0".join(p.name for p in objects).encode()).hexdigest()
        library = folder / f"emulation-{key[:16]}.so"
        if not library.exists():
            folders = [f"-L{p}" for p in cpp_extension.library_paths()]
            link_options = ["-ltorch_cpu", "-lc10", "-fopenmp", "-Wl,--no-undefined"]
            unfinished = library.with_suffix(".part")
            command = ["c++", "-shared", *map(str, objects), *folders, *link_options, "-o", str(unfinished)]
            subprocess.run(command, check=True)
            unfinished.rename(library)
    return library


@functools.cache
def load() -> None:
    """Load the library, which puts csrc's ops on the device "emulated". Call it once in a process."""
    from megatron_brorl.ops.fused import linear, native

    # torch looks for a module with the device's name and asks it for its random state.
    torch.utils.rename_privateuse1_backend(DEVICE)
    module = types.ModuleType(f"torch.{DEVICE}")
    module.__dict__["is_available"] = lambda: False
    torch._register_device_module(DEVICE, module)
    torch.ops.load_library(built())
    native.DEVICES = (*native.DEVICES, DEVICE)
    linear.CHUNK_ROWS[DEVICE] = CHUNK_ROWS
