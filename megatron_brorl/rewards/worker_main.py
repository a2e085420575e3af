"""The main module of a worker process: `python -m megatron_brorl.rewards.worker_main FACTORY MEMORY_MB PARENT_PID`.

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
from io import BufferedReader, FileIO
from typing import Any

from megatron_brorl.signals import end_with

READY = "ready"  # sent before the results of a message of calls, once all of their objects exist


def main(factory_path: str, memory_mb: int, parent: int) -> None:
    """Run calls from standard input until the parent closes it."""
    messages, results = isolate(memory_mb, parent)
    factory = load(factory_path)
    objects: dict[str, Any] = {}
    while messages.peek(1):
        calls: list[tuple[str, tuple[Any, ...]]] = pickle.load(messages)
        for name, _ in calls:
            if name not in objects:
                objects[name] = factory(name)
        silence_stderr()
        results.write(json_line(READY))
        for name, arguments in calls:
            results.write(json_line(objects[name](*arguments)))


def isolate(memory_mb: int, parent: int) -> tuple[BufferedReader, FileIO]:
    """Limit this process, and return its pipes from and to the parent, in place of standard input and output."""
    # A terminal or job scheduler may signal all processes of a job, but only the trainer handles these signals. The
    # memory limit ends a verifier that hostile text causes to allocate too much.
    end_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _limit(resource.RLIMIT_AS, memory_mb << 20)
    _limit(resource.RLIMIT_CORE, 0)

    # Verifiers may print. Their output must not reach the pipes of the parent.
    messages = os.fdopen(os.dup(0), "rb")
    results = os.fdopen(os.dup(1), "wb", buffering=0)
    silence = os.open(os.devnull, os.O_RDWR)
    os.dup2(silence, 0)
    os.dup2(silence, 1)
    return messages, results


def silence_stderr() -> None:
    """Discard stderr. The parent reads it only if an object cannot be created."""
    os.dup2(1, 2)  # isolate() has redirected stdout to /dev/null


def load(path: str) -> Any:
    """Return the object that "module:name" refers to."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def json_line(result: Any) -> bytes:
    """Return a result as the parent reads it."""
    return json.dumps(result).encode("ascii") + b"\n"


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
