"""The first process of a sandbox: it limits itself, starts the runner, and ends with it or with whoever gave the order.

`python -m megatron_brorl.rewards.sandbox.inside.guard`, with the order on standard input: a line of JSON, then one per
request. It runs nothing of the program's. Where it is process 1 of its own namespace nobody inside can signal it, and
the kernel ends all that is left inside when it ends.
"""

from __future__ import annotations

import os
import resource
import select
import signal
from typing import Any

from megatron_brorl.rewards.sandbox.inside import codec, judge, runner
from megatron_brorl.rewards.sandbox.inside.codec import Wire

_MODES = {"scripts": runner.scripts, "calls": runner.calls, "judge": judge.judge}


def main() -> None:
    """Carry out one order."""
    # The pipes are out of reach of what runs here under the numbers 0 and 1.
    wire = Wire(os.dup(0), os.dup(1))
    silence = os.open(os.devnull, os.O_RDWR)
    order = codec.parse(wire.read() or b"{}")
    order["alone"] = os.getpid() == 1  # in a namespace of its own: all that is there may be killed
    confine(order)
    wire.write({"up": True})
    for number in (0, 1, 2):
        os.dup2(silence, number)

    # Whatever is orphaned inside comes to process 1; ignored, it is gone without being waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _MODES[order["mode"]](wire, order)
        os._exit(0)

    # A closed pipe tells that the one outside is gone, even if it was killed.
    poll = select.poll()
    poll.register(wire.source, 0)
    poll.register(os.pidfd_open(child), select.POLLIN)
    poll.poll()
    if not order["alone"]:
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def confine(order: dict[str, Any]) -> None:
    """Give up the user and take the limits of the order, for good."""
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
