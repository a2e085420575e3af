"""Processes over gloo that run test functions: started once, used by many tests.

A job is "module:function" of tests/dist with picklable arguments; every rank calls function(rank, *args, **kwargs) and
the results come back in rank order. A rank that raises fails the test with its traceback.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import traceback
from collections.abc import Sequence
from typing import Any

import psutil
from forks import CONTEXT, adopt_listener, listen_on_free_port, rank_environments

# Parts of a layout with two ranks each.
TP, PP, CP, EP = ({name: 2} for name in ("tensor", "pipeline", "context", "expert"))
SEQUENCE = {**TP, "sequence": True}


def pairs(layouts: Sequence[tuple[Any, ...]], cases: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return (*layout, case) for every layout and case."""
    return [(*layout, case) for layout in layouts for case in cases]


class World:
    """`size` processes that wait for jobs."""

    def __init__(self, size: int) -> None:
        self.pipes = []
        self.processes = []
        with listen_on_free_port() as listener:
            for rank, environment in enumerate(rank_environments(listener, size)):
                parent_end, child_end = CONTEXT.Pipe()
                # Rank 0 has the store through which the ranks find each other. It takes over the socket, which
                # keeps the port reserved until then.
                arguments = (rank, environment, listener if rank == 0 else None, child_end)
                process = CONTEXT.Process(target=_serve, args=arguments)  # not a daemon, which may start no savers
                process.start()
                self.pipes.append(parent_end)
                self.processes.append(process)

    def run(self, job: str, *args: Any, timeout: float = 300, **kwargs: Any) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((job, args, kwargs))
        results = []
        failures = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(timeout):
                raise TimeoutError(f"{job}: rank {rank} gave no answer in {timeout} s")
            ok, value = pipe.recv()
            results.append(value)
            if not ok:
                failures.append(f"{job} failed on rank {rank}:\n{value}")
        if failures:  # All answers have been read, so the next job does not get them.
            raise AssertionError(failures[0])
        return results

    def close(self) -> None:
        """End the processes and those that they started to write checkpoints."""
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank = psutil.Process(process.pid)
                for member in [*rank.children(recursive=True), rank]:
                    member.kill()


def _serve(rank: int, environment: dict[str, str], listener: socket.socket | None, pipe: Any) -> None:
    os.environ.update(environment, OMP_NUM_THREADS="1")
    adopt_listener(listener)
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            job, args, kwargs = pipe.recv()
        except EOFError:
            return
        module, _, name = job.partition(":")
        try:
            pipe.send((True, getattr(importlib.import_module(f"dist.{module}"), name)(rank, *args, **kwargs)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
