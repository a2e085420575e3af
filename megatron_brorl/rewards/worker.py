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

from megatron_brorl.ranks import end_with
from megatron_brorl.rewards.worker_process import LENGTH, READY, Call

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(make_path: str, memory_mb: int, parent: int) -> None:
    """Carry out calls from standard input until the parent is gone."""
    # The signals of a job are meant for the trainer. The limits are for hostile text.
    end_with(parent)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _limit(resource.RLIMIT_AS, memory_mb << 20)
    _limit(resource.RLIMIT_CORE, 0)

    # Code that runs here may print, which must not reach the pipes of the parent.
    requests, results = os.dup(0), os.dup(1)
    silence = os.open(os.devnull, os.O_RDWR)
    os.dup2(silence, 0)
    os.dup2(silence, 1)

    make = load(make_path)
    objects: dict[str, Any] = {}
    while (calls := _read_calls(requests)) is not None:
        for name, _ in calls:
            if name not in objects:
                objects[name] = make(name)
        os.dup2(silence, 2)  # The parent reads on stderr why a start failed. From here on, results tell of failures.
        _write(results, READY)
        for name, arguments in calls:
            _write(results, objects[name](*arguments))


def load(path: str) -> Any:
    """Return what "module:name" names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _limit(what: int, value: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _write(fd: int, result: Any) -> None:
    os.write(fd, json.dumps(result).encode("ascii") + b"\n")


def _read_calls(fd: int) -> list[Call] | None:
    """Return the next calls; None when the parent is gone."""
    header = _read(fd, LENGTH.size)
    body = _read(fd, LENGTH.unpack(header)[0]) if header else None
    return pickle.loads(body) if body else None


def _read(fd: int, size: int) -> bytes | None:
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
