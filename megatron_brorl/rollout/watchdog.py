"""A deadline for the rollout engine, which generates in its own thread.

The watchdog collects rollouts as they end. Halfway to the time limit it prints a message that names the missing ones.
At the limit it asks the engine to stop. If the engine is still running after the grace period, the watchdog gives it
up, and the rollouts that it has not delivered are lost.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from torch import Tensor

from megatron_brorl.errors import UserError
from megatron_brorl.parallel import cpu_bridge
from megatron_brorl.rollout.engine import KvUsage, Request, RolloutEngine, Sampling, Supply
from megatron_brorl.types import Rollout

# (index of a request, rollout that has ended); called in the thread that generates, so it must be quick.
Finished = Callable[[int, Rollout], None]

GRACE_S = 30.0  # between "stop" and giving an engine up; one token of all rows takes far less
_NAMED = 8  # prompts of late rollouts that a message names


@dataclass(frozen=True)
class GenerationResult:
    """The result of one call of generate."""

    requests: list[Request]  # those given, then those that the engine took
    rollouts: list[list[Rollout]]  # per request, by index; what was not delivered is missing
    late: int  # number of rollouts that had not ended half-way to the limit


class Watchdog:
    """The engine of this rank, behind a deadline. For use from one thread."""

    def __init__(self, engine: RolloutEngine, timeout_s: float, rank: int = 0, grace_s: float = GRACE_S) -> None:
        """timeout_s: seconds that one call of generate may take (config key rollout.timeout_s)."""
        self.engine = engine
        self.timeout_s = timeout_s
        self.rank = rank
        self.grace_s = grace_s
        self.stuck = False
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        # A daemon thread, because the end of the process must not wait for it, as it does with concurrent.futures.
        self._thread = threading.Thread(
            target=_serve, args=(engine, self._calls, cpu_bridge.default_device()), name="rollouts", daemon=True
        )

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        finished: Finished | None = None,
        supply: Supply | None = None,
    ) -> GenerationResult:
        """Return the rollouts of the requests and of those that the engine took from `supply`.

        The call returns within timeout_s + grace_s seconds. The engine's thread calls `finished` once for each rollout
        of the result that is not "cut", as soon as it ends. If `finished` raises, the engine is asked to stop.
        Exceptions of `finished` and of the engine are raised again here. Raises UserError if an earlier call never
        ended.
        """
        # The thread is still in the call that was given up.
        if self.stuck:
            raise UserError(
                f"rank {self.rank}: the rollout engine is still busy with a call that was given up: start the same "
                "command again to go on from the last checkpoint"
            )

        call = _Call(requests, sampling, finished, supply)
        if not requests and not supply:
            return call.result(0)
        if not self._thread.is_alive():
            self._thread.start()
        self._calls.put(call)

        late = 0
        if not call.done.wait(self.timeout_s / 2):
            late = self._name_missing(call, self.timeout_s / 2, "waiting")
            if not call.done.wait(self.timeout_s / 2):
                self._name_missing(call, self.timeout_s, "telling the engine to stop")
                call.cancel()
                # The result includes all delivered rollouts, even if the engine does not stop.
                if not call.done.wait(self.grace_s):
                    self.stuck = True  # for good, because a thread cannot be ended from outside
                    self._name_missing(call, self.timeout_s + self.grace_s, "the engine did not stop and is given up")

        return call.result(late)

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See RolloutEngine; tensors [any shape]. A stuck engine takes no weights and is not asked again."""
        if self.stuck:
            self.engine.skip_update(tensors)
        else:
            self.engine.update_weights(tensors, version)

    def kv_usage(self) -> KvUsage | None:
        """See RolloutEngine; None for a stuck engine."""
        return None if self.stuck else self.engine.kv_usage()

    def restart(self, why: str) -> bool:
        """See RolloutEngine."""
        return self.engine.restart(why)

    def sleep(self) -> None:
        """See RolloutEngine; a stuck engine keeps its memory."""
        (self.engine.barrier if self.stuck else self.engine.sleep)()

    def wake(self) -> None:
        """See RolloutEngine; a stuck engine is left as it is."""
        (self.engine.barrier if self.stuck else self.engine.wake)()

    def _name_missing(self, call: _Call, seconds: float, then: str) -> int:
        asked, missing = call.missing()
        places = [f"{n} of prompt {r.prompt.id}" for r, n in zip(asked, missing, strict=True) if n]
        if len(places) > _NAMED:
            places[_NAMED:] = [f"and {len(places) - _NAMED} more"]
        text = (
            f"rank {self.rank}: {sum(missing)} of {sum(r.n for r in asked)} rollouts have not ended after "
            f"{seconds:g} s (rollout.timeout_s = {self.timeout_s:g}), {then}: {'; '.join(places)}"
        )
        with contextlib.suppress(OSError):  # The pipe's reader is gone.
            print(text, file=sys.stderr, flush=True)
        return sum(missing)


class _Call:
    """One call of generate and its results so far. It is the engine's GenerateCallbacks and its Supply."""

    def __init__(
        self, requests: Sequence[Request], sampling: Sampling, tell: Finished | None, supply: Supply | None
    ) -> None:
        self.requests = list(requests)
        self.sampling = sampling
        self._tell = tell
        self._supply = supply
        self.rows, self.prompt_tokens = (supply.rows, supply.prompt_tokens) if supply else (0, 0)
        self.done = threading.Event()
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._found: list[dict[int, Rollout]] = [{} for _ in requests]  # by sibling
        self._error: BaseException | None = None
        self._taken = False

    def finished(self, request: int, rollout: Rollout) -> None:
        asked = self.requests[request]
        if not asked.first <= rollout.index < asked.first + asked.n:
            raise ValueError(f"the engine delivered sibling {rollout.index} of {asked.prompt.id}, which was not asked")
        # A rollout that comes after the result was taken is lost.
        with self._lock:
            if self._taken or rollout.index in self._found[request]:
                return
            self._found[request][rollout.index] = rollout
            if self._tell and rollout.finish != "cut" and self._error is None:
                try:
                    self._tell(request, rollout)
                except BaseException as e:
                    self._error = e
                    self.cancel()

    def next_requests(self, room: int) -> list[Request]:
        # A cancelled engine takes no more requests, so that other ranks can sample them. The supply may be slow, so the
        # lock is not held while it is asked.
        assert self._supply is not None
        new = [] if self._cancelled.is_set() else self._supply.next_requests(room)
        with self._lock:
            if self._taken:
                return []
            self.requests += new
            self._found += [{} for _ in new]
        return new

    def has_more(self) -> bool:
        assert self._supply is not None
        return not self._cancelled.is_set() and self._supply.has_more()

    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        self._cancelled.set()

    def run(self, engine: RolloutEngine) -> None:
        """Generate, in the engine's thread."""
        try:
            supply = self if self._supply else None
            for i, rollouts in enumerate(engine.generate(list(self.requests), self.sampling, self, supply)):
                for rollout in rollouts:
                    self.finished(i, rollout)
        except BaseException as e:
            self._error = self._error or e
        self.done.set()

    def missing(self) -> tuple[list[Request], list[int]]:
        """Return the requests so far, and how many siblings of each have not ended."""
        with self._lock:
            return list(self.requests), [r.n - len(f) for r, f in zip(self.requests, self._found, strict=True)]

    def result(self, late: int) -> GenerationResult:
        if self._error is not None:
            raise self._error
        with self._lock:
            self._taken = True
            rollouts = [[found[i] for i in sorted(found)] for found in self._found]
            return GenerationResult(list(self.requests), rollouts, late)


def _serve(engine: RolloutEngine, calls: SimpleQueue[_Call], where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.set_device(where)  # every thread begins at device 0
    while True:
        calls.get().run(engine)
