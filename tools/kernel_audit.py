"""What nvcc makes of csrc's CUDA kernels, and how fast an H100 could be at best: `python tools/kernel_audit.py`.

Compiles every .cu for sm_90 and prints a table in Markdown: registers, spills and shared memory as ptxas reports them,
occupancy in closed form, bytes per element, and the time that they take at the H100's memory bandwidth. Nothing is run.
The bytes are stated below with their derivation; tests/emulation counts loads and stores and holds them to it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "csrc"
sys.path.insert(0, str(CSRC))

from nvcc_flags import NVCC_FLAGS  # noqa: E402  that setup.py uses too

# An H100 SXM: NVIDIA's data sheet, and compute capability 9.0 in the CUDA programming guide.
BYTES_PER_S, FLOPS = 3.35e12, 989e12  # of HBM3; of bf16 products without sparsity
WARP, WARPS, BLOCKS, REGISTERS = 32, 64, 32, 65536  # lanes; per multiprocessor: warps, blocks, registers
SHARED, SHARED_PER_BLOCK = 228 << 10, 1 << 10  # bytes of a multiprocessor; what CUDA keeps of them for each block
LAUNCHED = "common/gemm.cu"  # calls cuBLAS and has no kernel

REPORT = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers(?:[^\n]*?(\d+) bytes smem)?",
    re.S,
)


@dataclass(frozen=True)
class Kernel:
    """Bytes per element, in the types that training has: float32, logits that are sampled from in bfloat16."""

    name: str  # of the __global__ function, and which of its ways
    entry: str  # in its demangled name
    threads: int  # of a block
    element: str
    loaded: float
    stored: float
    least: float  # loaded and stored by whatever does the same: each input and each output once
    why: str


TENSOR_CORES = "brorl::(anonymous namespace)::TensorCores"
KERNELS = (
    Kernel("tokens_kernel", "tokens_kernel<float>", 256, "token", 28, 40, 68, "7 inputs; 2 gradients, 8 columns"),
    Kernel("statistics_kernel", "statistics_kernel<float>", 512, "logit", 4, 0, 4, "reads the logits once"),
    Kernel("gradient_kernel", "gradient_kernel<float, false>", 512, "logit", 4, 4, 8, "the logits, in place"),
    Kernel("gradient_kernel, narrow", "gradient_kernel<float, true>", 512, "logit", 4, 2, 6, "written as bfloat16"),
    Kernel("value_loss_kernel", "value_loss_kernel<float>", 256, "token", 16, 4, 20, "4 inputs; 1 gradient"),
    Kernel("moments_kernel", "moments_kernel<float, bool>", 256, "element", 5, 0, 5, "value and mask, once"),
    Kernel("whiten_kernel", "whiten_kernel<float>", 256, "element", 5, 4, 9, "value and mask; the value in place"),
    Kernel("gae_kernel", "gae_kernel<float>", 256, "token", 9, 8, 17, "reward, value, mask; advantage, return"),
    Kernel(
        *("group_kernel", "group_kernel<float>", 256, "rollout", 5, 4, 9),
        "reward and mask; advantage. A lane holds 16 rewards, a warp a group of 512; beyond, three looks",
    ),
    Kernel(
        *("sample_row", "sample_row<unsigned short>", 512, "logit", 2.1335, 0, 2),
        "once for the sums of 16 shares, then the share that is drawn from: 1/16, 1/256, ...",
    ),
    Kernel(
        *("sample_row, top-k", "sample_row<unsigned short>", 512, "logit", 4, 0, 2),
        "and once for a shortlist, out of which it cuts and draws",
    ),
    Kernel(
        *("sample_row, top-p", "sample_row<unsigned short>", 512, "logit", 4, 0, 2),
        "the same, where the shortlist of 256 or more holds what is kept",
    ),
    Kernel(
        *("sample_row, top-p, flat", "sample_row<unsigned short>", 512, "logit", 24.27, 0, 2),
        "where it does not: 8 passes that bisect two bits at a time, one for ties, one for what is kept",
    ),
    # Attention of a decoding step, heads of 128 in bfloat16; a token is one of a kv head.
    Kernel(
        *("own_kernel", f"own_kernel<{TENSOR_CORES}<16, 128> >", 256, "own token", 512, 1, 512),
        "key and value once for all query heads; stored are those of one new token in 512",
    ),
    Kernel(
        *("prompt_kernel", f"prompt_kernel<{TENSOR_CORES}<32, 128> >", 256, "prompt token", 1024, 0, 512),
        "of 32 queries, 16 a warp, so twice, the second time out of L1; other tiles of siblings find it in L2",
    ),
)


@dataclass(frozen=True)
class Compiled:
    """What ptxas reports of an entry; sizes in bytes."""

    entry: str
    stack: int
    spills: int
    registers: int
    shared: int


def occupancy(threads: int, registers: int, shared: int) -> float:
    """Share of a multiprocessor's warps that can be resident: CUDA's occupancy calculator for compute capability 9.0.

    Registers are given out to warps in units of 256, warps in fours; shared memory to blocks in units of 128 bytes.
    """
    warps = -(-threads // WARP)
    of_warp = -(-registers * WARP // 256) * 256
    by_registers = REGISTERS // of_warp // 4 * 4 // warps
    by_shared = SHARED // (-(-shared // 128) * 128 + SHARED_PER_BLOCK)
    return min(BLOCKS, WARPS // warps, by_registers, by_shared) * warps / WARPS


def compiled(nvcc: str) -> list[Compiled]:
    """Every entry of csrc's .cu files for sm_90. Exits with nvcc's words where it refuses one."""
    found = []
    flags = [x for x in NVCC_FLAGS if not x.startswith("-gencode")]
    for source in sorted(p for p in CSRC.rglob("*.cu") if str(p.relative_to(CSRC)) != LAUNCHED):
        with tempfile.TemporaryDirectory() as folder:
            command = [nvcc, *flags, "-arch=sm_90", "-Xptxas=-v", "-c", str(source), "-o", f"{folder}/out.o"]
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"kernel_audit: nvcc could not compile {source}:\n{done.stderr}")
        found += [entry(*match) for match in REPORT.findall(done.stderr)]
    return found


def entry(name: str, stack: str, stores: str, loads: str, registers: str, shared: str) -> Compiled:
    plain = subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout
    return Compiled(plain, int(stack), int(stores) + int(loads), int(registers), int(shared or 0))


def row(kernel: Kernel, found: list[Compiled]) -> str:
    """A line of the table. Exits where there is not exactly one entry of the kernel's name."""
    of = [x for x in found if f"::{kernel.entry}(" in x.entry]
    if len(of) != 1:
        raise SystemExit(f"kernel_audit: {len(of)} kernels are called {kernel.entry}; mend KERNELS")
    moved, share = kernel.loaded + kernel.stored, occupancy(kernel.threads, of[0].registers, of[0].shared)
    resources = f"{of[0].registers} | {of[0].spills} | {of[0].shared:,} | {share:.0%}"
    bound = f"{kernel.least:g} | {moved / kernel.least:.2f} | {kernel.least * 1e9 / BYTES_PER_S * 1e3:.2f}"
    return f"| `{kernel.name}` | {resources} | {kernel.element} | {moved:.4g} | {bound} | {kernel.why} |"


def main() -> None:
    nvcc = shutil.which("nvcc", path=f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin:{os.environ['PATH']}")
    if nvcc is None:
        raise SystemExit("kernel_audit: there is no nvcc: install the CUDA toolkit, or set CUDA_HOME")
    found = compiled(nvcc)
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[-2]
    print(f"{version}, {len(found)} kernels for sm_90.\n")
    print("| kernel | registers | spills, B | shared, B | occupancy | element | B each | least | ratio |", end="")
    print(" ms per 10^9 | the bytes |\n" + "|---" * 11 + "|")
    print("\n".join(row(kernel, found) for kernel in KERNELS))


if __name__ == "__main__":
    main()
