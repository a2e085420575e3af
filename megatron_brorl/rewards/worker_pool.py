"""A pool of worker processes that score answers.

Verifiers run on text that the policy wrote. If a verifier hangs, crashes, raises or returns an invalid value, only the
answer that it was scoring gets reward 0. The failure is counted and the step continues. The reward function that a
Python program passes (verifier IN_PROCESS) runs in the thread that calls `submit` instead, where a hang or a crash is
not contained. Scores do not depend on the number of workers or on the order of requests.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.custom import IN_PROCESS, RewardFunction
from megatron_brorl.rewards.verifier import MAX_REWARD, Judge, VerifierRow
from megatron_brorl.rewards.worker_process import WorkerLostError, WorkerProcess
from megatron_brorl.types import Prompt, ScoreResult

_MAX_JOBS_PER_MESSAGE = 256
_MAX_FAILED_STARTS = 3  # consecutive failures of one thread to start a worker process


@dataclass(frozen=True)
class ScoreRequest:
    """An answer, and the prompt whose verifier scores it."""

    prompt: Prompt
    answer: str | None  # None: the response contains no answer, so the score is 0
    no_answer_reason: str = field(default="", compare=False)  # set if answer is None


@dataclass
class PoolStats:
    """Counts since the last `RewardPool.reset`."""

    answers: int = 0  # requests with an answer, without those of verifier IN_PROCESS
    hits: int = 0  # requests answered from the cache
    restarts: int = 0  # worker processes that were replaced because they died or exceeded the timeout
    latency_max_s: float = 0.0  # the longest time from a request to its score


@dataclass(eq=False)
class _Job:
    name: str  # name of an object in the worker process
    arguments: tuple[Any, ...]
    future: Future[ScoreResult] = field(default_factory=Future)
    submitted: float = field(default_factory=time.monotonic)
    crashed_once: bool = False  # The worker died on this job. The cause may be unrelated, so the job runs once more.


@dataclass(eq=False)
class RewardPool:
    """Worker processes that score requests as they arrive. A context manager. Any thread may submit requests.

    `submit` puts a job into the queue and returns its future. Each worker thread starts one process, because on Linux a
    process with PR_SET_PDEATHSIG dies with the thread that started it. The thread sends several jobs at a time to its
    process, and sets their futures as results come back. The process calls a Judge for each job, which turns exceptions
    and invalid scores into results.
    """

    workers: int
    timeout_s: float
    # Import path "module:function" of a function that maps a verifier's name to its Judge.
    judge_factory: str = "megatron_brorl.rewards.registry:judge"
    impure: frozenset[str] = frozenset()  # verifiers whose scores are not cached, because equal answers may differ
    function: RewardFunction | None = None  # scores the requests of verifier IN_PROCESS, in the thread of `submit`

    def __post_init__(self) -> None:
        self.stats = PoolStats()
        self._in_process_judge = Judge(self.function) if self.function else None
        # Guards stats and the members below. Threads are notified of new jobs and of a stop.
        self._condition = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._cache: dict[Hashable, tuple[Future[ScoreResult], object]] = {}
        self._processes: set[WorkerProcess] = set()
        self._start()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def submit(self, request: ScoreRequest) -> Future[ScoreResult]:
        """Return a future for the score. Scores are cached until `reset`, except those of impure verifiers.

        The future raises UserError if a thread has failed _MAX_FAILED_STARTS times in a row to start its process.
        Raises RuntimeError if the pool is closed.
        """
        self._check_open()
        prompt = request.prompt
        answer = request.answer
        if answer is None:
            return completed(ScoreResult(0.0, "no_answer", request.no_answer_reason))
        row = cast(VerifierRow, prompt.row())
        if self._in_process_judge and prompt.verifier == IN_PROCESS:
            return completed(score_result(self._in_process_judge(answer, row)))

        # Metadata is not hashable, so the key contains its id. The cache keeps a reference to the metadata, because the
        # id is valid only while the object exists.
        key = (prompt.verifier, prompt.id, prompt.text, prompt.answer, id(prompt.metadata), answer)
        pure = prompt.verifier not in self.impure
        with self._condition:
            self._check_open()  # again, because another thread may have closed the pool since
            self.stats.answers += 1
            if pure and key in self._cache:
                self.stats.hits += 1
                return self._cache[key][0]
            future = self.call(prompt.verifier, (answer, row))
            if pure:
                self._cache[key] = future, prompt.metadata
        return future

    def call(self, name: str, arguments: tuple[Any, ...]) -> Future[ScoreResult]:
        """Return a future for the result of a call of the workers' object `name`. Raises errors as `submit` does."""
        job = _Job(name, arguments)
        with self._condition:
            self._check_open()
            if self._start_error:
                job.future.set_exception(self._start_error)
            else:
                self._queue.append(job)
                self._condition.notify()
        return job.future

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreResult]:
        """Return one score per request, in order. An error cancels all pending scores, also those of other callers."""
        self._check_open()
        try:
            futures = [self.submit(request) for request in requests]
            return [future.result() for future in futures]
        except BaseException:
            self.cancel()
            raise

    def reset(self) -> None:
        """Drop the cached scores and reset the counts."""
        with self._condition:
            self._cache.clear()
            self.stats = PoolStats()

    def cancel(self) -> None:
        """Cancel all pending scores, and replace the worker processes, which may be computing them."""
        if not self._stopped:
            self._stop(error=None)
            self._start()

    def close(self) -> None:
        """Kill the worker processes. Pending futures and later calls of `submit` raise RuntimeError."""
        self._stop(RuntimeError("the reward pool was closed before this answer was scored"))

    def _check_open(self) -> None:
        if self._stopped:
            raise RuntimeError("the reward pool is closed")

    def _start(self) -> None:
        self._stopped = False
        self._start_error: UserError | None = None  # set once a thread gives up starting its worker process
        self._threads = []
        for _ in range(self.workers):
            # Daemon threads let the program exit even if the pool was not closed.
            self._threads.append(threading.Thread(target=self._run_workers, name="rewards", daemon=True))
            self._threads[-1].start()

    def _stop(self, error: Exception | None) -> None:
        """Kill the worker processes. Set `error` on the pending futures, or cancel them if it is None."""
        with self._condition:
            self._stopped = True
            for process in self._processes:
                process.stop()
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()
        self._cache.clear()
        while self._queue:
            future = self._queue.popleft().future
            if error:
                future.set_exception(error)
            else:
                future.cancel()

    def _run_workers(self) -> None:
        """Run a worker process, and start another one when it dies. The body of a worker thread."""
        failed_starts = 0
        reason = ""
        while failed_starts < _MAX_FAILED_STARTS and not self._stopped:
            failed_starts += 1  # set to 0 below if the process runs a job
            jobs: deque[_Job] = deque()
            process = None
            try:
                process = WorkerProcess(self.judge_factory)
                with self._condition:
                    self._processes.add(process)
                while jobs := self._next_jobs():
                    calls = [(job.name, job.arguments) for job in jobs]
                    for reply in process.run(calls, self.timeout_s):
                        score = score_result(reply)
                        self._deliver(jobs.popleft(), score)
                    failed_starts = 0
            except WorkerLostError as lost:
                reason = str(lost)
                if lost.during_call:
                    failed_starts = 0
                self._handle_lost_worker(lost, jobs)
            except OSError as e:
                reason = f"{e.strerror}; is the machine overloaded?"
            if process:
                process.close()
            with self._condition:
                self._processes.discard(process)
                self._queue.extendleft(reversed(jobs))
                self._condition.notify_all()
        with self._condition:
            if not self._stopped:
                self._start_error = UserError(f"reward worker cannot start: {reason}")
                while self._queue:
                    self._queue.popleft().future.set_exception(self._start_error)

    def _next_jobs(self) -> deque[_Job]:
        """Wait for jobs and take some from the queue. Return an empty deque after `_stop`."""
        with self._condition:
            self._condition.wait_for(lambda: self._queue or self._stopped)
            # Take a quarter of this thread's share, so that all workers finish at about the same time.
            size = min(_MAX_JOBS_PER_MESSAGE, max(1, len(self._queue) // (4 * self.workers)))
            return deque() if self._stopped else deque(self._queue.popleft() for _ in range(size))

    def _deliver(self, job: _Job, score: ScoreResult) -> None:
        with self._condition:
            self.stats.latency_max_s = max(self.stats.latency_max_s, time.monotonic() - job.submitted)
        job.future.set_result(score)

    def _handle_lost_worker(self, lost: WorkerLostError, jobs: deque[_Job]) -> None:
        """Give reward 0 to the job that a lost worker was running, or leave it in `jobs` to run once more.

        jobs: those without a score. If the worker was lost during a call, the first one was running.
        """
        if self._stopped:
            return
        # Count first, because the trainer reads the statistics once it has all scores.
        with self._condition:
            self.stats.restarts += 1
        if not lost.during_call:
            return
        if lost.timed_out:
            self._deliver(jobs.popleft(), ScoreResult(0.0, "timeout", f"no score in {self.timeout_s:g} s"))
        elif jobs[0].crashed_once:
            reason = "the worker process died or wrote an invalid result twice on this answer"
            self._deliver(jobs.popleft(), ScoreResult(0.0, "crash", reason))
        else:
            jobs[0].crashed_once = True


def completed(score: ScoreResult) -> Future[ScoreResult]:
    """Return a future that has its result."""
    future: Future[ScoreResult] = Future()
    future.set_result(score)
    return future


def score_result(reply: Any) -> ScoreResult:
    """Return the score in the reply of a Judge. Raises WorkerLostError if the reply is not a valid score.

    A Judge replies with valid scores only, so any other reply means that its process is corrupted.
    """
    try:
        status, reward, reason, parts = reply
        numbers = [reward, *parts.values()]
        valid = status in ("ok", "error", "invalid", "broken") and isinstance(reason, str)
        if valid and all(type(n) in (int, float) and abs(n) <= MAX_REWARD for n in numbers):
            return ScoreResult(float(reward), status, reason, parts)
    except (TypeError, ValueError, AttributeError):
        pass
    raise WorkerLostError("wrote a result that is not a score", during_call=True)
