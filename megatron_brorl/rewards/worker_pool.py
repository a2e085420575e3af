"""A pool of worker processes that judge answers.

Verifiers run on text that the policy wrote. A verifier that hangs, crashes, raises or returns nonsense costs its answer
the reward and is counted. It never costs the step. Verdicts do not depend on the number of workers or on the order of
requests.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.custom import IN_PROCESS, OwnReward
from megatron_brorl.rewards.verifier import MOST_REWARD, Judge, VerifierRow
from megatron_brorl.rewards.worker_process import WorkerLostError, WorkerProcess
from megatron_brorl.types import Prompt, Verdict

_MAX_CHUNK = 256  # answers per message
_START_ATTEMPTS = 3  # in a row, for each worker
_CACHED_CHARS = 1024  # Longer answers are hardly ever equal.


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
    hits: int = 0  # requests that got the verdict of an equal one
    restarts: int = 0  # workers that were lost or killed
    latency_max_s: float = 0.0  # the longest time from a request to its verdict


@dataclass(eq=False)
class _Job:
    verifier: str
    answer: str
    row: VerifierRow
    verdict: Future[Verdict] = field(default_factory=Future)
    submitted: float = field(default_factory=time.monotonic)
    crashed: bool = False  # Its worker died once. That may have been chance, so the answer gets a second attempt.


class RewardPool:
    """Worker processes that judge requests as they come. For use from any thread; a context manager.

    Each worker belongs to a thread, which takes jobs from the common queue. On Linux a worker dies with the thread that
    started it, so the thread that talks to a worker also starts it.
    """

    def __init__(
        self,
        workers: int,
        timeout_s: float,
        make: str = "megatron_brorl.rewards.registry:judge",
        impure: frozenset[str] = frozenset(),
        function: OwnReward | None = None,
    ) -> None:
        """make: "module:function" from the name of a verifier to its Judge. impure: verifiers that may score equal
        answers differently. function: judges requests of verifier IN_PROCESS in a thread of this process."""
        self.stats = PoolStats()
        self._count, self._timeout_s, self._make, self._impure = workers, timeout_s, make, impure
        self._judge = Judge(function) if function else None
        self._changed = threading.Condition()  # guards the members below
        self._queue: deque[_Job] = deque()
        self._cache: dict[Hashable, tuple[Future[Verdict], object]] = {}
        self._processes: set[WorkerProcess] = set()
        self._start()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that run."""
        with self._changed:
            return [process.pid for process in self._processes]

    def submit(self, request: ScoreRequest) -> Future[Verdict]:
        """Return the future verdict. A pure verifier judges equal answers to a prompt once, until `forget`.

        The future raises UserError if a worker cannot be started. Raises RuntimeError if the pool is closed.
        """
        self._check_open()
        prompt, answer = request.prompt, request.answer
        if answer is None:
            nothing: Future[Verdict] = Future()
            nothing.set_result(Verdict(0.0, "no_answer", request.why))
            return nothing

        row = VerifierRow(id=prompt.id, prompt=prompt.text, answer=prompt.answer, metadata=prompt.metadata)
        if self._judge and prompt.verifier == IN_PROCESS:
            return self._thread.submit(lambda judge: _verdict(judge(answer, row)), self._judge)

        # Metadata is not hashable, so the key contains its id. The cache also refers to the metadata, because the id
        # is valid only while the object exists.
        key = (prompt.verifier, prompt.id, prompt.text, prompt.answer, id(prompt.metadata), answer)
        cached = len(answer) <= _CACHED_CHARS and prompt.verifier not in self._impure
        job = _Job(prompt.verifier, answer, row)
        with self._changed:
            self.stats.answers += 1
            if cached and key in self._cache:
                self.stats.hits += 1
                return self._cache[key][0]
            if cached:
                self._cache[key] = job.verdict, prompt.metadata
            if self._failed:
                job.verdict.set_exception(self._failed)
            else:
                self._queue.append(job)
                self._changed.notify()
        return job.verdict

    def score(self, requests: Sequence[ScoreRequest]) -> list[Verdict]:
        """Return one verdict per request, in order."""
        self._check_open()
        try:
            verdicts = [self.submit(request) for request in requests]
            return [verdict.result() for verdict in verdicts]
        except BaseException:
            self.cancel()
            raise

    def forget(self) -> None:
        """Drop the cached verdicts and reset the counts."""
        with self._changed:
            self._cache.clear()
            self.stats = PoolStats()

    def cancel(self) -> None:
        """Cancel all verdicts that are missing, and replace the workers, which may be busy with them.

        The in-process function finishes the answer that it has begun.
        """
        if not self._stopped:
            self._stop(None)
            self._start()

    def close(self) -> None:
        """Kill the workers. Missing verdicts raise RuntimeError, and so does every later request."""
        self._stop(RuntimeError("the reward pool was closed before its verdict"))

    def _check_open(self) -> None:
        if self._stopped:
            raise RuntimeError("the reward pool is closed")

    def _start(self) -> None:
        self._stopped = False
        self._failed: UserError | None = None  # why a worker cannot be started
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward")
        # Daemon threads do not keep a process alive that ends without closing the pool.
        serve = [threading.Thread(target=self._serve, name="verdicts", daemon=True) for _ in range(self._count)]
        self._threads = serve
        for thread in serve:
            thread.start()

    def _stop(self, error: Exception | None) -> None:
        """Kill the workers, and fail the jobs without a verdict; None cancels them."""
        self._thread.shutdown(wait=error is not None, cancel_futures=True)
        with self._changed:
            self._stopped = True
            for process in self._processes:
                process.stop()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._cache.clear()
        while self._queue:
            verdict = self._queue.popleft().verdict
            if error:
                verdict.set_exception(error)
            else:
                verdict.cancel()

    def _serve(self) -> None:
        """Run one worker after another; the body of a thread."""
        failures, reason = 0, ""
        while failures < _START_ATTEMPTS and not self._stopped:
            failures += 1
            jobs: deque[_Job] = deque()
            process = None
            try:
                process = WorkerProcess(self._make)
                with self._changed:
                    self._processes.add(process)
                while jobs := self._take():
                    calls = [(job.verifier, (job.answer, job.row)) for job in jobs]
                    for reply in process.run(calls, self._timeout_s):
                        verdict = _verdict(reply)
                        self._deliver(jobs.popleft(), verdict)
                    failures = 0
            except WorkerLostError as lost:
                reason, failures = str(lost), 0 if lost.started else failures
                self._blame(lost, jobs)
            except OSError as e:
                reason = f"{e.strerror}; is the machine overloaded?"
            if process:
                process.close()
            with self._changed:
                self._processes.discard(process)
                self._queue.extendleft(reversed(jobs))
                self._changed.notify_all()
        if not self._stopped:
            self._fail(UserError(f"reward worker cannot start: {reason}"))

    def _take(self) -> deque[_Job]:
        """Wait for jobs; return none after `_stop`."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._stopped)
            size = min(_MAX_CHUNK, max(1, len(self._queue) // (4 * self._count)))
            return deque() if self._stopped else deque(self._queue.popleft() for _ in range(size))

    def _deliver(self, job: _Job, verdict: Verdict) -> None:
        stats = self.stats
        stats.latency_max_s = max(stats.latency_max_s, time.monotonic() - job.submitted)
        job.verdict.set_result(verdict)

    def _blame(self, lost: WorkerLostError, jobs: deque[_Job]) -> None:
        """Score the job that a lost worker had begun, if that is to blame."""
        if self._stopped:
            return
        self.stats.restarts += 1  # before the last verdict of a step is delivered
        if lost.timed_out and lost.started:
            self._deliver(jobs.popleft(), Verdict(0.0, "timeout", f"no verdict in {self._timeout_s:g} s"))
        elif lost.started and jobs[0].crashed:
            self._deliver(jobs.popleft(), Verdict(0.0, "crash", "its process died, twice"))
        elif lost.started:
            jobs[0].crashed = True

    def _fail(self, error: UserError) -> None:
        with self._changed:
            self._failed = error
            jobs = list(self._queue)
            self._queue.clear()
        for job in jobs:
            job.verdict.set_exception(error)


def _verdict(reply: Any) -> Verdict:
    """Return the verdict in a reply of a Judge. Raises WorkerLostError for anything else."""
    try:
        status, reward, reason, parts = reply
        numbers = [reward, *parts.values()]
        valid = status in ("ok", "error", "invalid", "broken") and isinstance(reason, str)
        if valid and all(type(n) in (int, float) and abs(n) <= MOST_REWARD for n in numbers):
            return Verdict(float(reward), status, reason, parts)
    except (TypeError, ValueError, AttributeError):
        pass
    raise WorkerLostError("wrote a result that is not a verdict", started=True)
