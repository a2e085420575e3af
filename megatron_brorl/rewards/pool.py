"""Scoring in worker processes that can be killed.

Verifiers run on text that the policy wrote. One that hangs, crashes, raises or returns nonsense costs its answer the
reward and is counted; it never costs the step. Verdicts do not depend on the number of workers, nor on when requests
came in.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from megatron_brorl.rewards.cache import VerdictCache
from megatron_brorl.rewards.lanes import Job, Lanes
from megatron_brorl.rewards.process import WorkerProcess
from megatron_brorl.rewards.protocol import Item
from megatron_brorl.rewards.verifier import VerifierRow
from megatron_brorl.types import Prompt, Verdict

REGISTRY = "megatron_brorl.rewards.registry:verifier"


@dataclass(frozen=True)
class ScoreRequest:
    """An answer to be scored."""

    prompt: Prompt
    answer: str | None  # None: the response holds no answer
    why: str = field(default="", compare=False)  # it holds none


@dataclass(frozen=True)
class PoolStats:
    """What the pool was asked since it last forgot."""

    answers: int  # requests that had one
    hits: int  # of them, those judged together with an equal one
    restarts: int  # workers that were lost or killed
    queue_mean_s: float  # from a request to when a worker began with it
    queue_max_s: float


class RewardPool:
    """Worker processes that judge requests as they come. For use from any thread; a context manager.

    resolve names the function that maps a verifier's name to the verifier, as "module:function" (tests give their own).
    impure are the names of verifiers that
    judge equal answers one by one.
    """

    def __init__(
        self,
        workers: int,
        timeout_s: float,
        memory_mb: int = 4096,
        resolve: str = REGISTRY,
        impure: frozenset[str] = frozenset(),
    ) -> None:
        self._impure = impure
        self._lock = threading.Lock()  # over the cache and the counts
        self._cache = VerdictCache()
        self._answers = self._hits = 0
        self._lanes = Lanes(workers, timeout_s, lambda: WorkerProcess(resolve, memory_mb))

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers. Verdicts that are still missing raise RuntimeError, and so does every later request."""
        self._lanes.close()

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return self._lanes.pids

    def submit(self, request: ScoreRequest) -> Future[Verdict]:
        """The verdict to come. A pure verifier judges equal answers to the same prompt once, until `forget`.

        Its result raises UserError where no worker can be started. Raises RuntimeError where the pool is closed.
        """
        self._lanes.check_open()
        prompt, answer = request.prompt, request.answer
        if answer is None:  # costs no worker anything
            nothing: Future[Verdict] = Future()
            nothing.set_result(Verdict(0.0, "no_answer", request.why))
            return nothing

        # A verdict is a function of these. Metadata goes by identity, for it has no hash; the cache keeps it alive.
        key: Hashable = (prompt.verifier, prompt.id, prompt.text, prompt.answer, id(prompt.metadata), answer)
        pure = prompt.verifier not in self._impure
        with self._lock:
            known = self._cache.get(key) if pure else None
            if known is None:
                # Of rows of one prompt a message holds the texts and the metadata once, by their identity.
                row = VerifierRow(id=prompt.id, prompt=prompt.text, answer=prompt.answer, metadata=prompt.metadata)
                job = Job(Item(prompt.verifier, row, answer))
                self._lanes.put(job)
                if pure:
                    self._cache.put(key, job.verdict, len(answer), prompt.metadata)
            self._answers += 1
            self._hits += known is not None
        return known or job.verdict

    def score(self, requests: Sequence[ScoreRequest]) -> list[Verdict]:
        """One verdict per request, in order."""
        self._lanes.check_open()
        try:
            verdicts = [self.submit(request) for request in requests]
            return [verdict.result() for verdict in verdicts]
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Give up every verdict that is still missing: whoever waits for one gets CancelledError."""
        self._lanes.cancel()

    def forget(self) -> None:
        """Drop the verdicts that were kept, and count from here."""
        with self._lock:
            self._cache.clear()
            self._answers = self._hits = 0
        self._lanes.renew()

    def stats(self) -> PoolStats:
        """Of what came since `forget`."""
        lanes = self._lanes.stats
        mean = lanes.queue_s / (lanes.begun or 1)
        with self._lock:
            return PoolStats(self._answers, self._hits, lanes.restarts, mean, lanes.queue_most_s)
