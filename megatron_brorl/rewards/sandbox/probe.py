"""Test whether this machine can isolate programs."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import sys

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.sandbox import isolation, seccomp
from megatron_brorl.rewards.sandbox.isolation import Limits
from megatron_brorl.rewards.sandbox.process import SandboxError
from megatron_brorl.rewards.sandbox.run import Sandbox

KEY = "reward.unsandboxed"
WARNING = f"{KEY} = true: programs that the model writes run as this user, with limits but without isolation"


@functools.lru_cache(maxsize=1)
def problem() -> str | None:
    """Return why programs cannot be isolated here, and the remedy, in one line; None if they can."""
    if sys.platform != "linux" or platform.machine() not in seccomp.MACHINES:
        return f"no sandbox for {sys.platform} on {platform.machine()}; use Linux on x86_64 or aarch64"
    if not shutil.which("bwrap"):
        return "bubblewrap is missing; install it (apt-get install bubblewrap)"

    # A container may forbid namespaces, which only a trial run shows.
    try:
        outcome = Sandbox(True, Limits(seconds=20.0, test_seconds=20.0)).run("print(6 * 7)", "")
    except (SandboxError, OSError) as e:
        reason = " ".join(str(e).split())
    else:
        if outcome.stdout == "42\n":
            return None
        reason = outcome.reason or "a program gave the wrong output"
    return f"{reason}; permit user namespaces (docker run --security-opt seccomp=unconfined --cap-add SYS_ADMIN)"


def refuse(where: str, reason: str) -> UserError:
    """Return the error for a machine without isolation."""
    return UserError(f"{where}: {reason}; or set {KEY} = true to run what the model writes without isolation")


def require(where: str) -> bool:
    """Return whether to isolate programs. Raises UserError if they must be isolated and cannot be."""
    if os.environ.get(isolation.UNSANDBOXED) == "1":
        return False
    reason = problem()
    if reason:
        raise refuse(where, reason)
    return True
