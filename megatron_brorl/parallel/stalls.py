"""Names the ranks that a stalled run waits for, before its collectives time out.

NCCL ends a process at a timeout without naming a rank. Until then Python's other threads run, because a thread that
waits for the device does not hold the interpreter's lock.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from megatron_brorl.parallel import network
from megatron_brorl.tracking.timeline import place


def _print(line: str) -> None:
    print(f"brorl: {line}", file=sys.stderr, flush=True)


class StallReporter(threading.Thread):
    """Writes this rank's place to the store if no span begins or ends, and reports the late ranks on rank 0.

    A rank writes after 0.8 x timeout_s without progress. Rank 0 waits another 0.1 x timeout_s for the other ranks.
    """

    def __init__(self, timeout_s: float, report: Callable[[str], None] = _print) -> None:
        """timeout_s: of the collectives. All ranks must create it at the same point of the program."""
        super().__init__(name="stalls", daemon=True)
        self.timeout_s = timeout_s
        self._report = report
        self._first = place().changes  # Earlier code of this process may not have run on the other ranks.
        # The main thread may wait for a key, and then holds the lock of its connection.
        self._store = network.shared_store().clone()  # type: ignore[attr-defined]
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()

    def run(self) -> None:
        """Watch until `stop`."""
        rank, size = dist.get_rank(), dist.get_world_size()
        written = -1
        while size > 1 and not self._stopped.wait(self.timeout_s / 20):
            now = place()
            if now.changes == written or time.monotonic() < now.due + 0.8 * self.timeout_s:
                continue
            written = now.changes
            try:
                self._store.set(_key(rank), f"{now.changes - self._first} {now.name}")
                if rank == 0 and not self._stopped.wait(self.timeout_s / 10) and place() == now:
                    self._report(_late_ranks(self._store, size))
            except RuntimeError as e:
                self._report(f"rank {rank} waits in {now.name!r}, and rank 0 does not answer: {e}")
                return


def _key(rank: int) -> str:
    return f"stalls/{rank}"


def _late_ranks(store: dist.Store, size: int) -> str:
    """Return a line with the ranks that have written no place, or an earlier one than others."""
    places = {rank: store.get(_key(rank)).decode().split(" ", 1) for rank in range(size) if store.check([_key(rank)])}
    furthest, phase = max((int(changes), name) for changes, name in places.values())
    late: dict[str, list[str]] = {}
    for rank in range(size):
        changes, name = places.get(rank, ("-1", "no report: dead, or still working"))
        if int(changes) < furthest:
            late.setdefault(name, []).append(str(rank))
    ranks = "; ".join(f"rank {', '.join(ranks)} ({name})" for name, ranks in late.items())
    return f"no progress in {phase!r}; behind are: {ranks or 'none'}"
