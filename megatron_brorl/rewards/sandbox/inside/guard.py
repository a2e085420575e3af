"""The first process of a sandbox: it limits itself, starts the runner, and ends when the runner or the caller ends.

`python -m megatron_brorl.rewards.sandbox.inside.guard`, with the job on standard input: a line of JSON, then one
line per request. It runs no code of the program. As process 1 of its own namespace it receives no signals from inside,
and when it ends, the kernel ends every process in the namespace.
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
    """Run one job."""
    # Move the pipes to other file descriptors than 0 and 1, which the program could use.
    wire = Wire(os.dup(0), os.dup(1))
    silence = os.open(os.devnull, os.O_RDWR)
    job = codec.parse(wire.read() or b"{}")
    job["has_namespace"] = os.getpid() == 1  # In a namespace of its own, the runner may kill every process.
    confine(job)
    wire.write({"up": True})
    for number in (0, 1, 2):
        os.dup2(silence, number)

    # Orphans become children of process 1. With SIGCHLD ignored, the kernel reaps them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _MODES[job["mode"]](wire, job)
        os._exit(0)

    # The pipe closes when the caller ends, even if it was killed.
    poll = select.poll()
    poll.register(wire.source, 0)  # reports only that the pipe was closed
    poll.register(os.pidfd_open(child), select.POLLIN)
    poll.poll()
    if not job["has_namespace"]:
        os.killpg(0, signal.SIGKILL)  # 0: the group of this process
    os._exit(0)


def confine(job: dict[str, Any]) -> None:
    """Change to the unprivileged user and set the limits of the job, irrevocably."""
    if (user := job["user"]) is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    for name, value in job["limits"].items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (limit, limit))


if __name__ == "__main__":
    main()
