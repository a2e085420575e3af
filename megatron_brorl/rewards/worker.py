"""The main module of a worker process: `python -m megatron_brorl.rewards.worker MAKE MEMORY_MB PARENT_PID`.

It never imports torch, and the kernel ends it when its parent ends.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import resource
import signal
import sys
from typing import Any

from megatron_brorl.signals import end_with

READY = "ready"  # the first result after a message of calls: all of their objects exist


def main(make_path: str, memory_mb: int, parent: int) -> None:
    """Carry out calls from standard input until the parent is gone."""
    # Signals of a job are meant for the trainer. The memory limit stops verifiers that hostile text makes grow.
    end_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _limit(resource.RLIMIT_AS, memory_mb << 20)
    _limit(resource.RLIMIT_CORE, 0)

    # Verifiers may print. Their output must not reach the pipes of the parent.
    requests = os.fdopen(os.dup(0), "rb")
    results = os.fdopen(os.dup(1), "wb", buffering=0)
    silence = os.open(os.devnull, os.O_RDWR)
    os.dup2(silence, 0)
    os.dup2(silence, 1)

    make = load(make_path)
    objects: dict[str, Any] = {}
    while requests.peek(1):
        calls: list[tuple[str, tuple[Any, ...]]] = pickle.load(requests)
        for name, _ in calls:
            if name not in objects:
                objects[name] = make(name)
        os.dup2(silence, 2)  # The parent reads stderr if a start fails. Later failures are results.
        results.write(_line(READY))
        for name, arguments in calls:
            results.write(_line(objects[name](*arguments)))


def load(path: str) -> Any:
    """Return the object that "module:name" refers to."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _line(result: Any) -> bytes:
    return json.dumps(result).encode("ascii") + b"\n"


def _limit(what: int, value: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
