"""A time limit for the rollout engine, which generates in its own thread.

The watchdog collects rollouts as they finish. At half of the time limit it logs the missing ones. At the limit it asks
the engine to stop. If the engine is still running after the grace period, the watchdog abandons it, and the rollouts
that it has not delivered are lost. A training step has one limit. The limit of an evaluation starts again as long as
rollouts finish, because an evaluation may have any size, and its metrics would be wrong without the longest responses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from torch import Tensor

from megatron_brorl.errors import UserError, print_error
from megatron_brorl.parallel import cpu_bridge
from megatron_brorl.rollout.engine import KvUsage, Request, RolloutEngine, Sampling, Supply
from megatron_brorl.types import Rollout

# Called with the index of a request and a finished rollout in the generating thread, so it must be quick.
OnFinished = Callable[[int, Rollout], None]

GRACE_S = 30.0  # seconds that an engine has to stop; one decoding step takes far less
_MAX_LOGGED = 8  # prompts per log message


@dataclass(frozen=True)
class GenerationResult:
    """The result of one call of generate."""

    requests: list[Request]  # the given requests, then those from the supply
    rollouts: list[list[Rollout]]  # per request, by index, without those that were not delivered
    late: int  # number of rollouts that were unfinished at half of the time limit


@dataclass(eq=False)
class Watchdog:
    """Runs this rank's engine with a time limit. Not thread-safe."""

    engine: RolloutEngine
    timeout_s: float  # seconds that generating the rollouts of a step may take (config key rollout.timeout_s)
    rank: int = 0
    grace_s: float = GRACE_S

    def __post_init__(self) -> None:
        self.stuck = False
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        # A daemon thread, because the process must be able to exit while the engine hangs.
        arguments = self.engine, self._calls, cpu_bridge.default_device()
        self._thread = threading.Thread(target=_run_calls, args=arguments, name="rollouts", daemon=True)

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        finished: OnFinished | None = None,
        supply: Supply | None = None,
        renew_limit: bool = False,
    ) -> GenerationResult:
        """Return the rollouts of the requests and of those that the engine got from `supply`.

        The call returns within timeout_s + grace_s seconds. With renew_limit, it returns within that time after
        the last rollout has finished. The engine's thread calls `finished` once for each rollout of the result that is
        not "cut", as soon as it ends. If `finished` raises, the engine is asked to stop. Exceptions of `finished` and
        of the engine are raised here. Raises UserError if an earlier call never returned.
        """
        if self.stuck:  # The thread is still in the abandoned call.
            raise UserError(
                f"rank {self.rank}: the rollout engine still hangs in an abandoned call: run the same command again to "
                "continue from the last checkpoint"
            )

        call = _Call(list(requests), sampling, finished, supply, renew_limit)
        if not requests and not supply:
            return call.result(late=0)
        if not self._thread.is_alive():
            self._thread.start()
        self._calls.put(call)

        late = 0
        if not call.wait(self.timeout_s / 2):
            late = self._log_missing(call, self.timeout_s / 2, "waiting")
            if not call.wait(self.timeout_s / 2):
                self._log_missing(call, self.timeout_s, "asking the engine to stop")
                call.cancel()
                # The result includes all delivered rollouts, even if the engine does not stop.
                if not call.done.wait(self.grace_s):
                    self.stuck = True  # permanently, because Python cannot kill a thread
                    self._log_missing(call, self.timeout_s + self.grace_s, "the engine did not stop and is abandoned")

        return call.result(late)

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See RolloutEngine; tensors [any shape]. A stuck engine gets no weights."""
        if self.stuck:
            self.engine.skip_update(tensors)
        else:
            self.engine.update_weights(tensors, version)

    def kv_usage(self) -> KvUsage | None:
        """See RolloutEngine; None for a stuck engine."""
        return None if self.stuck else self.engine.kv_usage()

    def restart(self, why: str) -> bool:
        return self.engine.restart(why)

    def sleep(self) -> None:
        """See RolloutEngine; a stuck engine keeps its memory."""
        (self.engine.barrier if self.stuck else self.engine.sleep)()

    def wake(self) -> None:
        """See RolloutEngine; a stuck engine is not called."""
        (self.engine.barrier if self.stuck else self.engine.wake)()

    def _log_missing(self, call: _Call, seconds: float, action: str) -> int:
        requests, missing = call.missing()
        places = [f"{n} of prompt {r.prompt.id}" for r, n in zip(requests, missing, strict=True) if n]
        if len(places) > _MAX_LOGGED:
            places[_MAX_LOGGED:] = [f"and {len(places) - _MAX_LOGGED} more"]
        print_error(
            f"rank {self.rank}: {sum(missing)} of {sum(r.n for r in requests)} rollouts are unfinished after "
            f"{seconds:g} s{' without progress' if call.renew_limit else ''} (rollout.timeout_s = {self.timeout_s:g}), "
            f"{action}: {'; '.join(places)}"
        )
        return sum(missing)


@dataclass(eq=False)
class _Call:
    """One call of generate and its results so far. It is the engine's GenerateCallbacks and its Supply."""

    requests: list[Request]
    sampling: Sampling
    on_finished: OnFinished | None
    supply: Supply | None
    renew_limit: bool

    def __post_init__(self) -> None:
        self.rows, self.prompt_tokens = (self.supply.rows, self.supply.prompt_tokens) if self.supply else (0, 0)
        self.done = threading.Event()
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._rollouts: list[dict[int, Rollout]] = [{} for _ in self.requests]  # by sibling, per request
        self._error: BaseException | None = None
        self._returned = False

    def finished(self, request: int, rollout: Rollout) -> None:
        asked = self.requests[request]
        if not asked.first <= rollout.index < asked.first + asked.n:
            name = f"sibling {rollout.index} of {asked.prompt.id}"
            raise ValueError(f"the engine returned {name}, which was not requested")
        # Rollouts that arrive after the result was returned are lost.
        with self._lock:
            if self._returned or rollout.index in self._rollouts[request]:
                return
            self._rollouts[request][rollout.index] = rollout
            if self.on_finished and rollout.finish != "cut" and self._error is None:
                try:
                    self.on_finished(request, rollout)
                except BaseException as e:
                    self._error = e
                    self.cancel()

    def next_requests(self, room: int) -> list[Request]:
        # A cancelled engine gets no more requests, so that other ranks can sample them. The supply may be slow, so the
        # call does not hold the lock.
        assert self.supply is not None
        new = [] if self._cancelled.is_set() else self.supply.next_requests(room)
        with self._lock:
            if self._returned:
                return []
            self.requests += new
            self._rollouts += [{} for _ in new]
        return new

    def has_more(self) -> bool:
        assert self.supply is not None
        return not self._cancelled.is_set() and self.supply.has_more()

    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        self._cancelled.set()

    def run(self, engine: RolloutEngine) -> None:
        """Run generate in the engine's thread."""
        try:
            supply = self if self.supply else None
            for i, rollouts in enumerate(engine.generate(list(self.requests), self.sampling, self, supply)):
                for rollout in rollouts:
                    self.finished(i, rollout)
        except BaseException as e:
            self._error = self._error or e
        self.done.set()

    def wait(self, seconds: float) -> bool:
        """Return whether generate returns in `seconds`. With renew_limit, a finished rollout restarts the time."""
        while True:
            finished = self._finished_rollouts()
            if self.done.wait(seconds):
                return True
            if not self.renew_limit or finished == self._finished_rollouts():
                return False

    def _finished_rollouts(self) -> int:
        with self._lock:
            return sum(map(len, self._rollouts))

    def missing(self) -> tuple[list[Request], list[int]]:
        """Return the requests so far and the number of unfinished siblings of each."""
        with self._lock:
            pairs = zip(self.requests, self._rollouts, strict=True)
            return list(self.requests), [request.n - len(siblings) for request, siblings in pairs]

    def result(self, late: int) -> GenerationResult:
        if self._error is not None:
            raise self._error
        with self._lock:
            self._returned = True
            rollouts = [[siblings[i] for i in sorted(siblings)] for siblings in self._rollouts]
            return GenerationResult(list(self.requests), rollouts, late)


def _run_calls(engine: RolloutEngine, calls: SimpleQueue[_Call], device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # new threads start with device 0
    while True:
        calls.get().run(engine)
