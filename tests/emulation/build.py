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
VARIABLE = "BRORL_EMULATED"  # set if tests/gpu runs the kernels without a GPU
CHUNK_ROWS = 64  # logits per chunk: several chunks for a hundred rows
LAUNCHED = "common/gemm.cu"  # calls cuBLAS and has no kernel
# A fortified longjmp, the default of some compilers, refuses to switch stacks.
FLAGS = ["-std=c++17", "-fPIC", "-w", "-Wno-psabi", "-U_FORTIFY_SOURCE"]
WATCHED = ["-fsanitize=thread,bounds", "--param=tsan-instrument-func-entry-exit=0"]  # for memory.cpp
OF_TORCH = ["device.cpp", "ops.cpp"]  # include torch's headers; they compile faster without -O2


def _compiled(source: Path, folder: Path) -> Path:
    """Return the object of one source. It is cached under a hash of its text and all headers."""
    # Fake CUDA headers come before csrc. Kernels are compiled without torch's headers, as by nvcc.
    kernel = source.suffix == ".cu"
    of_torch = source.name in OF_TORCH
    include = [f"-I{HERE / 'stand_in'}"]
    include += [f"-isystem{p}" for p in cpp_extension.include_paths()] if of_torch else []
    kind = ["-O0", "-fopenmp", "-DBRORL_CUDA=1"] if of_torch else ["-O2", *(WATCHED if kernel else [])]
    flags = [*FLAGS, *kind, *include, f"-I{HERE}", f"-I{CSRC}"]

    ours = [*CSRC.rglob("*.h"), *(CSRC.rglob("*.cpp") if of_torch else [])]
    headers = sorted([*HERE.rglob("*.h"), *(ours if kernel or source.name == "ops.cpp" else [])])
    inputs = [*FLAGS, *kind, torch.__version__, source.name, source.read_text(encoding="utf-8")]
    key = hashlib.sha256("\0".join([*inputs, *(p.read_text(encoding="utf-8") for p in headers)]).encode()).hexdigest()
    target = folder / f"{source.stem}-{key[:16]}.o"
    if not target.exists():
        part = target.with_suffix(".part")
        subprocess.run(["c++", *flags, "-x", "c++", "-c", str(source), "-o", str(part)], check=True)
        part.rename(target)
    return target


def built() -> Path:
    """Return the library of the emulation with the kernels of csrc."""
    folder = ROOT / "build" / "emulation"
    folder.mkdir(parents=True, exist_ok=True)
    kernels = [p for p in sorted(CSRC.rglob("*.cu")) if str(p.relative_to(CSRC)) != LAUNCHED]
    with (folder / "lock").open("w") as lock, ThreadPoolExecutor(2) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other test processes may build at the same time
        # If two objects have a function, the linker takes the first, that of the instrumented kernels.
        objects = list(pool.map(lambda p: _compiled(p, folder), [*kernels, *sorted(HERE.glob("*.cpp"))]))
        key = hashlib.sha256("\0".join(p.name for p in objects).encode()).hexdigest()
        library = folder / f"emulation-{key[:16]}.so"
        if not library.exists():
            places = [f"-L{p}" for p in cpp_extension.library_paths()]
            link_options = ["-ltorch_cpu", "-lc10", "-fopenmp", "-Wl,--no-undefined"]
            part = library.with_suffix(".part")
            subprocess.run(["c++", "-shared", *map(str, objects), *places, *link_options, "-o", str(part)], check=True)
            part.rename(library)
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
