"""Which of the extension's modules this processor runs best.

A wheel for x86-64 has the kernels once for each level of the processor (x86-64 psABI, "micro-architecture levels"),
in a module each; a build for one processor, or for ARM, has one module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

from megatron_brorl.errors import UserError

VARIABLE = "BRORL_CPU"  # the environment variable that asks for a level
CPUINFO = Path("/proc/cpuinfo")
PACKAGE = Path(__file__).parents[2]
ONLY = "_C"

_V3 = frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# Best first: the module, and what it needs beyond any x86-64, by Linux's names. Linux tells only what it has set up.
LEVELS = {"x86-64-v4": ("_C_v4", _V4), "x86-64-v3": ("_C_v3", _V3), "x86-64": (ONLY, frozenset[str]())}


def chosen(modules: Collection[str], asked: str = "", cpuinfo: Path = CPUINFO) -> str:
    """The module to load of those that are built.

    asked: the level that the user asks for, or nothing. Raises UserError for a level that there is not, or that this
    processor does not run.
    """
    if set(modules) <= {ONLY}:
        if asked:
            raise UserError(f"{VARIABLE}={asked}: this build of csrc has the kernels for one processor alone; unset it")
        return ONLY
    if asked and asked not in LEVELS:
        raise UserError(f"{VARIABLE}={asked}: there is no such level; it takes {', '.join(LEVELS)}")

    # The one that was asked for, or the best that it runs.
    for level in [asked] if asked else LEVELS:
        module, needs = LEVELS[level]
        lacking = needs - _flags(cpuinfo) if needs else needs
        if asked and lacking:
            raise UserError(f"{VARIABLE}={asked}: this processor has no {', '.join(sorted(lacking))}")
        if module in modules and not lacking:
            return module
    return ONLY


def built() -> set[str]:
    """The modules of the extension that stand in the package."""
    return {path.name.split(".")[0] for path in PACKAGE.glob("_C*.so")}


def _flags(cpuinfo: Path) -> frozenset[str]:
    """What Linux says that this processor has."""
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text(encoding="ascii", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "flags":
                return frozenset(value.split())
    raise UserError(f"{cpuinfo}: does not say what this processor has (flags); set {VARIABLE}=x86-64 for any")
