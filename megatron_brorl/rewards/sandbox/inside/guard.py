"""The first process of a sandbox: it limits itself, starts the runner, and ends with it or with the caller.

`python -m megatron_brorl.rewards.sandbox.inside.guard`, with the order on standard input: a line of JSON, then one per
request. It runs no code of the program. As process 1 of its own namespace it receives no signals from inside, and when
it ends, the kernel ends every process in the namespace.
"""

from __future__ import annotations

import os
import resource
import select
import signal
from typing import Any

from megatron_brorl.rewards.sandbox.inside import codec, runner
from megatron_brorl.rewards.sandbox.inside.codec import Wire

_MODES = {"scripts": runner.scripts, "calls": runner.calls, "asserts": runner.asserts}


def main() -> None:
    """Carry out one order."""
    # The program must not reach the pipes under the numbers 0 and 1.
    wire = Wire(os.dup(0), os.dup(1))
    silence = os.open(os.devnull, os.O_RDWR)
    order = codec.parse(wire.read() or b"{}")
    order["has_namespace"] = os.getpid() == 1  # In a namespace of its own it may kill every process.
    confine(order)
    wire.write({"up": True})
    for number in (0, 1, 2):
        os.dup2(silence, number)

    # Orphans become children of process 1. With SIGCHLD ignored, the kernel reaps them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _MODES[order["mode"]](wire, order)
        os._exit(0)

    # The pipe closes when the caller ends, even if it was killed.
    poll = select.poll()
    poll.register(wire.source, 0)
    poll.register(os.pidfd_open(child), select.POLLIN)
    poll.poll()
    if not order["has_namespace"]:
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def confine(order: dict[str, Any]) -> None:
    """Change to the unprivileged user and set the limits of the order, irrevocably."""
    if order["user"] is not None:
        os.setgroups([])
        os.setresgid(*(order["user"],) * 3)
        os.setresuid(*(order["user"],) * 3)
    for name, value in order["limits"].items():
        what = getattr(resource, name)
        hard = resource.getrlimit(what)[1]
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (least, least))


if __name__ == "__main__":
    main()
