"""What this machine has of what a run needs; what is wrong ends in a line that says what to do."""

from __future__ import annotations

import argparse
import importlib.util
import os
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
from megatron_brorl.errors import UserError
from megatron_brorl.model_shape import read_shape
from megatron_brorl.rewards.sandbox import probe
from megatron_brorl.rollout.registry import ENGINES

LEAST_SHARED_MIB = 1024  # Docker's default of 64 holds no weights


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    value: str
    remedy: str = ""  # where it is wrong


def examine() -> list[Finding]:
    """Every check of this machine, in the order of the report."""
    return [check() for check in CHECKS]


def report(findings: list[Finding]) -> tuple[list[str], int]:
    """Lines to print, and the exit code: 1 where something is wrong."""
    lines = [f"{'  ok' if not f.remedy else 'BAD '}  {f.name:20} {f.value}" for f in findings]
    lines += [f"      {f.name}: {f.remedy}" for f in findings if f.remedy]
    return lines, int(any(f.remedy for f in findings))


def plan_of(args: argparse.Namespace) -> list[str]:
    """What the run of a configuration needs of memory here, in lines. Raises UserError where it does not fit."""
    config = load(args.config, args.overrides)
    if args.ranks < 0 or args.ranks_per_node < 0 or args.gpu_gib < 0:
        raise UserError("brorl doctor: --ranks, --ranks-per-node and --gpu-gib must not be negative")
    ranks = args.ranks or torch.cuda.device_count() or 1
    gpu = int(args.gpu_gib * 2**30) or gpu_bytes()
    machines = Machines(ranks, min(args.ranks_per_node or 8, ranks), gpu, here=not args.gpu_gib)
    return preflight(config, read_shape(config.model.path), machines)[1]


def _python() -> Finding:
    return Finding("python", sys.version.split()[0], "" if sys.version_info >= (3, 10) else "install 3.10 or newer")


def _torch() -> Finding:
    return Finding("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}")


def _megatron() -> Finding:
    version = metadata.version("megatron-core")
    return Finding("megatron-core", version, "" if version.startswith("0.16.") else "install megatron-core==0.16.*")


def _devices() -> Finding:
    if not torch.cuda.is_available():
        driver = shutil.which("nvidia-smi")
        wrong = "there is a driver: install a torch with CUDA, or start the container with --gpus all" if driver else ""
        return Finding("GPUs", "none: runs on the CPU", wrong)
    count = torch.cuda.device_count()
    least = min(torch.cuda.get_device_capability(i) for i in range(count))
    name = f"{count} x {torch.cuda.get_device_name(0)}"
    return Finding("GPUs", name, "" if least >= (8, 0) else "csrc is built for compute capability 8.0 and newer")


def _extension() -> Finding:
    from megatron_brorl.ops.fused import native

    built = "with" if native.CUDA else "without"
    wrong = torch.cuda.is_available() and not native.CUDA
    remedy = "install again with BRORL_CUDA=1 and CUDA_HOME set" if wrong else ""
    return Finding("csrc", f"CPU kernels for {native.PROCESSOR}, {built} CUDA kernels", remedy)


def _engine() -> Finding:
    """Imports of Transformer Engine fail with other errors than ImportError where a library is missing."""
    if importlib.util.find_spec("transformer_engine") is None:
        return Finding("Transformer Engine", "none: Megatron's own layers")
    version = metadata.version("transformer-engine")
    code = "import transformer_engine.pytorch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return Finding("Transformer Engine", version, f"cannot be imported ({last}): mend it" if done.returncode else "")


def _remote_engine(section: str) -> Finding:
    """The engine of this section of the configuration: what it needs is wanted where it is itself."""
    kind = ENGINES[section]
    if importlib.util.find_spec(kind.package) is None:
        return Finding(kind.name, f"not in this environment: name another by {section}.python")
    remedies = [remedy for package, remedy in kind.needs.items() if importlib.util.find_spec(package) is None]
    return Finding(kind.name, metadata.version(kind.package), "; ".join(remedies))


def _shared_memory() -> Finding:
    if not os.path.isdir("/dev/shm"):
        return Finding("shared memory", "no /dev/shm", "mount one (docker run --shm-size=16g)")
    size = shutil.disk_usage("/dev/shm").total / 2**20
    wrong = torch.cuda.is_available() and size < LEAST_SHARED_MIB
    return Finding("shared memory", f"{size:.0f} MiB", "docker run --shm-size=16g" if wrong else "")


def _sandbox() -> Finding:
    """Only verifiers that run programs need one, and they refuse to start without it."""
    reason = probe.problem()
    return Finding("sandbox", f'none for verifier "code": {reason}' if reason else "bubblewrap isolates programs")


CHECKS: tuple[Callable[[], Finding], ...] = (
    _python,
    _torch,
    _megatron,
    _devices,
    _extension,
    _engine,
    *(partial(_remote_engine, section) for section in ENGINES),
    _shared_memory,
    _sandbox,
)
