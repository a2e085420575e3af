"""The extension built from csrc/. Importing this module loads it and registers its ops as torch.ops.brorl.

A wheel for x86-64 has the CPU kernels once for each level of the processor (x86-64 psABI, "micro-architecture levels"),
each in a module of its own. A build for one processor, or for ARM, has one module.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_brorl.errors import UserError

LEVEL_VARIABLE = "BRORL_CPU"  # environment variable that asks for a level
CPUINFO = Path("/proc/cpuinfo")
BASE_MODULE = "_C"  # for any x86-64 processor, or the only module of the build

_V3 = frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# Best first: the module, and the flags of /proc/cpuinfo that it needs. Linux lists only features that it has enabled.
LEVELS = {"x86-64-v4": ("_C_v4", _V4), "x86-64-v3": ("_C_v3", _V3), "x86-64": (BASE_MODULE, frozenset[str]())}


def choose_module(built: Collection[str], level: str = "", cpuinfo: Path = CPUINFO) -> str:
    """Return which of the built modules to load.

    level: the level that the user asks for, or "". Raises UserError for one that is unknown or that does not run here.
    """
    if set(built) <= {BASE_MODULE}:
        if level:
            raise UserError(f"{LEVEL_VARIABLE}={level}: this build of csrc is for one processor only; unset it")
        return BASE_MODULE
    if level and level not in LEVELS:
        raise UserError(f"{LEVEL_VARIABLE}={level}: there is no such level; it takes {', '.join(LEVELS)}")

    for candidate in [level] if level else LEVELS:
        module, required = LEVELS[candidate]
        lacking = required - _flags(cpuinfo) if required else frozenset[str]()
        if level and lacking:
            raise UserError(f"{LEVEL_VARIABLE}={level}: this processor has no {', '.join(sorted(lacking))}")
        if module in built and not lacking:
            return module
    return BASE_MODULE


def _flags(cpuinfo: Path) -> frozenset[str]:
    text = cpuinfo.read_text(encoding="ascii", errors="replace") if cpuinfo.exists() else ""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    raise UserError(f"{cpuinfo}: does not list the processor's flags; set {LEVEL_VARIABLE}=x86-64 for any processor")


def _load() -> Any:
    """Return the extension's module for this processor. Raises UserError if it does not load into this torch."""
    built = {path.name.split(".")[0] for path in Path(__file__).parents[2].glob("_C*.so")}
    name = choose_module(built, os.environ.get(LEVEL_VARIABLE, ""))
    try:
        extension = importlib.import_module(f"megatron_brorl.{name}")
    except ImportError as error:
        raise UserError(
            f"ops: the extension megatron_brorl.{name} does not load ({error}): build it for this Python and torch "
            "with pip install . in the checkout (make does it), start from another folder if the checkout hides an "
            'installed package, or set ops.implementation = "reference"'
        ) from error

    # An extension built for another release of torch may load and then misread torch's objects.
    release = extension.torch
    if torch.__version__.split("+")[0] != release:
        raise UserError(
            f"ops: the extension was built for torch {release}, this is {torch.__version__}: install "
            'megatron-brorl again, or set ops.implementation = "reference"'
        )
    return extension


EXTENSION: Any = _load()
CUDA: bool = EXTENSION.cuda  # whether it has CUDA kernels (BRORL_CUDA)
PROCESSOR: str = EXTENSION.processor  # processor that its CPU kernels were built for
BFLOAT16_KERNEL: bool = EXTENSION.has_bfloat16_kernel()
DEVICES = ("cpu", "cuda") if CUDA else ("cpu",)


def check_devices(op: str, *tensors: Tensor | None) -> None:
    """Raise ValueError unless all tensors are on one device that the extension has kernels for."""
    devices = {x.device for x in tensors if x is not None}
    if len(devices) > 1 or any(d.type not in DEVICES for d in devices):
        built = "CPU and CUDA" if CUDA else "CPU (BRORL_CUDA=0)"
        raise ValueError(
            f"{op}: tensors are on {', '.join(sorted(map(str, devices)))}; all must be on one device, and the "
            f"extension was built for {built}"
        )
