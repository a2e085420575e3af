"""A pool of worker processes that score answers.

Verifiers run on text that the policy wrote. If a verifier hangs, crashes, raises or returns an invalid value, only
the answer that it was scoring gets reward 0. The failure is counted and the step continues. Scores do not depend on
the number of workers or on the order of requests.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.custom import IN_PROCESS, RewardFunction
from megatron_brorl.rewards.verifier import MOST_REWARD, Judge, VerifierRow
from megatron_brorl.rewards.worker_process import WorkerLostError, WorkerProcess
from megatron_brorl.types import Prompt, ScoreResult

_MAX_CHUNK = 256  # answers per message
_START_ATTEMPTS = 3  # consecutive attempts to start each worker


@dataclass(frozen=True)
class ScoreRequest:
    """An answer to be scored."""

    prompt: Prompt
    answer: str | None  # None: the response holds no answer
    why: str = field(default="", compare=False)  # the reason for None


@dataclass
class PoolStats:
    """Counts since the last `RewardPool.forget`."""

    answers: int = 0  # requests with an answer
    hits: int = 0  # requests answered from the cache
    restarts: int = 0  # workers that were lost or killed
    latency_max_s: float = 0.0  # the longest time from a request to its score


@dataclass(eq=False)
class _Job:
    verifier: str
    answer: str
    row: VerifierRow
    score: Future[ScoreResult] = field(default_factory=Future)
    submitted: float = field(default_factory=time.monotonic)
    crashed: bool = False  # Its worker died once. The cause may be unrelated, so the answer gets a second attempt.


class RewardPool:
    """Worker processes that score requests as they arrive. A context manager. Any thread may submit requests.

    Each worker belongs to a thread, which takes jobs from the common queue. On Linux a worker dies with the thread that
    started it (PR_SET_PDEATHSIG), so the thread that talks to a worker also starts it.
    """

    def __init__(
        self,
        workers: int,
        timeout_s: float,
        make: str = "megatron_brorl.rewards.registry:judge",
        impure: frozenset[str] = frozenset(),
        function: RewardFunction | None = None,
    ) -> None:
        """make: import path "module:function" of a function that returns the Judge for a verifier's name.

        impure: verifiers that may score equal answers differently. function: scores requests of verifier IN_PROCESS,
        in the thread that submits them.
        """
        self.stats = PoolStats()
        self._count = workers
        self._timeout_s = timeout_s
        self._make = make
        self._impure = impure
        self._judge = Judge(function) if function else None
        self._changed = threading.Condition()  # guards stats and the members below
        self._queue: deque[_Job] = deque()
        self._cache: dict[Hashable, tuple[Future[ScoreResult], object]] = {}
        self._processes: set[WorkerProcess] = set()
        self._start()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def submit(self, request: ScoreRequest) -> Future[ScoreResult]:
        """Return the future score. Scores of pure verifiers are cached until `forget`.

        The future raises UserError if a worker cannot be started. Raises RuntimeError if the pool is closed.
        """
        self._check_open()
        prompt = request.prompt
        answer = request.answer
        if answer is None:
            return _done(ScoreResult(0.0, "no_answer", request.why))
        row = VerifierRow(id=prompt.id, prompt=prompt.text, answer=prompt.answer, metadata=prompt.metadata)
        if self._judge and prompt.verifier == IN_PROCESS:
            return _done(_score_result(self._judge(answer, row)))

        # Metadata is not hashable, so the key contains its id. The cache keeps a reference to the metadata, because the
        # id is valid only while the object exists.
        key = (prompt.verifier, prompt.id, prompt.text, prompt.answer, id(prompt.metadata), answer)
        pure = prompt.verifier not in self._impure
        job = _Job(prompt.verifier, answer, row)
        with self._changed:
            self.stats.answers += 1
            if pure and key in self._cache:
                self.stats.hits += 1
                return self._cache[key][0]
            if pure:
                self._cache[key] = job.score, prompt.metadata
            if self._failed:
                job.score.set_exception(self._failed)
            else:
                self._queue.append(job)
                self._changed.notify()
        return job.score

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreResult]:
        """Return one score per request, in order."""
        self._check_open()
        try:
            scores = [self.submit(request) for request in requests]
            return [score.result() for score in scores]
        except BaseException:
            self.cancel()
            raise

    def forget(self) -> None:
        """Drop the cached scores and reset the counts."""
        with self._changed:
            self._cache.clear()
            self.stats = PoolStats()

    def cancel(self) -> None:
        """Cancel all pending scores, and replace the workers, which may be busy with them."""
        if not self._stopped:
            self._stop(None)
            self._start()

    def close(self) -> None:
        """Kill the workers. Pending scores raise RuntimeError, and so does every later request."""
        self._stop(RuntimeError("the reward pool was closed before this answer was scored"))

    def _check_open(self) -> None:
        if self._stopped:
            raise RuntimeError("the reward pool is closed")

    def _start(self) -> None:
        self._stopped = False
        self._failed: UserError | None = None  # why a worker cannot be started
        # Daemon threads let the process exit even if the pool was not closed.
        serve = [threading.Thread(target=self._serve, name="rewards", daemon=True) for _ in range(self._count)]
        self._threads = serve
        for thread in serve:
            thread.start()

    def _stop(self, error: Exception | None) -> None:
        """Kill the workers. Set `error` on pending jobs, or cancel them if it is None."""
        with self._changed:
            self._stopped = True
            for process in self._processes:
                process.stop()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._cache.clear()
        while self._queue:
            score = self._queue.popleft().score
            if error:
                score.set_exception(error)
            else:
                score.cancel()

    def _serve(self) -> None:
        """Run a worker, and start another one when it dies. The body of a thread."""
        failures = 0
        reason = ""
        while failures < _START_ATTEMPTS and not self._stopped:
            failures += 1
            jobs: deque[_Job] = deque()
            process = None
            try:
                process = WorkerProcess(self._make)
                with self._changed:
                    self._processes.add(process)
                while jobs := self._next_jobs():
                    calls = [(job.verifier, (job.answer, job.row)) for job in jobs]
                    for reply in process.run(calls, self._timeout_s):
                        score = _score_result(reply)
                        self._deliver(jobs.popleft(), score)
                    failures = 0
            except WorkerLostError as lost:
                reason = str(lost)
                if lost.started:
                    failures = 0
                self._blame(lost, jobs)
            except OSError as e:
                reason = f"{e.strerror}; is the machine overloaded?"
            if process:
                process.close()
            with self._changed:
                self._processes.discard(process)
                self._queue.extendleft(reversed(jobs))
                self._changed.notify_all()
        with self._changed:
            if not self._stopped:
                self._failed = UserError(f"reward worker cannot start: {reason}")
                while self._queue:
                    self._queue.popleft().score.set_exception(self._failed)

    def _next_jobs(self) -> deque[_Job]:
        """Wait for jobs; return none after `_stop`."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._stopped)
            size = min(_MAX_CHUNK, max(1, len(self._queue) // (4 * self._count)))
            return deque() if self._stopped else deque(self._queue.popleft() for _ in range(size))

    def _deliver(self, job: _Job, score: ScoreResult) -> None:
        with self._changed:
            self.stats.latency_max_s = max(self.stats.latency_max_s, time.monotonic() - job.submitted)
        job.score.set_result(score)

    def _blame(self, lost: WorkerLostError, jobs: deque[_Job]) -> None:
        """Score the job that a lost worker was running, unless the job gets a second attempt."""
        if self._stopped:
            return
        # Count first, because the step reads the statistics once it has all scores.
        with self._changed:
            self.stats.restarts += 1
        if lost.timed_out and lost.started:
            self._deliver(jobs.popleft(), ScoreResult(0.0, "timeout", f"no score in {self._timeout_s:g} s"))
        elif lost.started and jobs[0].crashed:
            self._deliver(jobs.popleft(), ScoreResult(0.0, "crash", "the worker process died twice on this answer"))
        elif lost.started:
            jobs[0].crashed = True


def _done(score: ScoreResult) -> Future[ScoreResult]:
    future: Future[ScoreResult] = Future()
    future.set_result(score)
    return future


def _score_result(reply: Any) -> ScoreResult:
    """Return the score in the reply of a Judge. Raises WorkerLostError if the reply is not a valid score."""
    try:
        status, reward, reason, parts = reply
        numbers = [reward, *parts.values()]
        valid = status in ("ok", "error", "invalid", "broken") and isinstance(reason, str)
        if valid and all(type(n) in (int, float) and abs(n) <= MOST_REWARD for n in numbers):
            return ScoreResult(float(reward), status, reason, parts)
    except (TypeError, ValueError, AttributeError):
        pass
    raise WorkerLostError("wrote a result that is not a score", started=True)
