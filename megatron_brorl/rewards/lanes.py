"""The workers of a reward pool, and the one thread that they belong to.

That thread starts them, hands out jobs, listens, and replaces who is gone or silent for too long. Nobody else touches a
worker or its pipes: other threads put jobs in and take verdicts from the jobs' futures. On Linux a worker dies with the
thread that started it, which is why this one lives as long as the pool.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.process import WorkerProcess
from megatron_brorl.rewards.protocol import READY, STATUSES, Item
from megatron_brorl.types import Verdict

_START_S = 120.0  # for the imports of a worker
_START_ATTEMPTS = 3  # in a row, for each worker
_CHUNK = 256  # items at most per message


@dataclass(eq=False)
class Job:
    """An item to be judged, and where its verdict will be."""

    item: Item
    verdict: Future[Verdict] = field(default_factory=Future)
    submitted: float = field(default_factory=time.monotonic)
    begun: bool = False
    crashed: bool = False  # its worker died of it, or by chance


@dataclass
class LaneStats:
    """How the jobs and the workers of a step fared."""

    begun: int = 0  # jobs
    queue_s: float = 0.0  # that they waited before a worker began, added up
    queue_most_s: float = 0.0  # the longest
    restarts: int = 0  # workers that were lost or killed


class Lanes:
    """The workers and their thread. All methods are for other threads."""

    def __init__(self, count: int, timeout_s: float, start: Callable[[], WorkerProcess]) -> None:
        """start: a new worker. Comes back when all are started, though they still import."""
        self.stats = LaneStats()
        self._count, self._timeout_s, self._start = count, timeout_s, start
        self._given_up = 0  # workers that could not be started, so that the others go on without them
        self._lanes: list[_Lane] = []
        self._queue: deque[Job] = deque()  # others append on the right; the thread takes, and gives back, on the left
        self._cancelled: deque[threading.Event] = deque()  # calls of cancel that wait
        self._closed, self._lock = False, threading.Lock()

        # Others end the thread's sleep through this pipe.
        self._selector = selectors.DefaultSelector()
        self._awake, self._wake = os.pipe()
        self._woken = False  # a byte is in it that was not read yet
        self._selector.register(self._awake, selectors.EVENT_READ)

        # A daemon, which the end of the process does not wait for; the workers end with it.
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(started,), name="verdicts", daemon=True)
        self._thread.start()
        started.wait()

    @property
    def pids(self) -> list[int]:
        """The process numbers of the workers."""
        return [lane.worker.pid for lane in list(self._lanes)]

    def put(self, job: Job) -> None:
        """Have it judged. Raises RuntimeError once the lanes are closed."""
        with self._lock:
            self.check_open()
            self._queue.append(job)
            self._poke()

    def check_open(self) -> None:
        """Raise RuntimeError once the lanes are closed."""
        if self._closed:
            raise RuntimeError("the reward pool is closed")

    def renew(self) -> None:
        """Count from here; workers that were given up get another chance."""
        self.stats, self._given_up = LaneStats(), 0

    def cancel(self) -> None:
        """Give up every job, and the workers that may be at one."""
        done = threading.Event()
        with self._lock:
            if self._closed:
                return
            self._cancelled.append(done)
            self._poke()
        done.wait()

    def close(self) -> None:
        """End the workers and the thread; jobs that were not judged fail."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._poke()
        self._thread.join()

    def _poke(self) -> None:
        if not self._woken:
            self._woken = True
            os.write(self._wake, b"\0")

    # From here on all is called by the thread alone.

    def _serve(self, started: threading.Event) -> None:
        while not self._closed:
            # What goes wrong is for those who wait for verdicts. The next job finds new workers.
            try:
                if not started.is_set():
                    self._fill()
                    started.set()
                self._turn()
            except BaseException as e:
                started.set()
                self._drop(e)

        # Nobody puts anything in any more.
        self._drop(RuntimeError("the reward pool was closed before its verdict"))
        self._cancel()
        self._selector.close()
        os.close(self._awake)
        os.close(self._wake)

    def _turn(self) -> None:
        # Keep all workers busy. Only who has answered all gets more: a worker that writes verdicts reads no items.
        self._cancel()
        if self._queue:
            self._fill()
        for lane in self._lanes:
            if self._queue and not lane.pending:
                self._hand_out(lane)

        # Listen until the next deadline.
        # Deadlines are measured from before, so that a verdict in the pipe is never too late.
        began = time.monotonic()
        deadline = min((lane.deadline for lane in self._lanes), default=float("inf"))
        wait = None if deadline == float("inf") else max(0.0, deadline - began)
        events = self._selector.select(wait)
        heard = {key.data for key, mask in events if key.data and mask & selectors.EVENT_READ}
        for key, mask in events:
            if key.data is None:
                os.read(self._awake, 4096)
                self._woken = False  # after the byte is out, or the next one would never be written
            elif mask & selectors.EVENT_WRITE:
                self._flush(key.data)

        # Who is gone or too slow is replaced.
        for lane in list(self._lanes):
            if lane in heard:
                alive = self._listen(lane)  # which sets its next deadline
            else:
                alive = lane.deadline > began  # silent although its time was up before we listened
                if not alive:
                    self._time_out(lane)
            if not alive:
                self._replace(lane)

    def _fill(self) -> None:
        while len(self._lanes) < self._count - self._given_up:
            self._open(0)

    def _open(self, attempts: int) -> None:
        """Start a worker, after so many in its place that never got to work."""
        try:
            lane = _Lane(self._start(), attempts)
        except OSError as e:
            self._give_up(f"{e.strerror}; is the machine overloaded?")
            return
        self._selector.register(lane.worker.verdicts, selectors.EVENT_READ, lane)
        self._lanes.append(lane)

    def _hand_out(self, lane: _Lane) -> None:
        size = min(_CHUNK, max(1, len(self._queue) // (4 * len(self._lanes))))
        lane.pending.extend(self._queue.popleft() for _ in range(min(size, len(self._queue))))

        # Imports take long. A worker that has none left to do and says nothing is stopped, or lost in some other way.
        names = {job.item.verifier for job in lane.pending}
        limit = self._timeout_s if names <= lane.imported else _START_S
        lane.ready, lane.deadline = False, time.monotonic() + limit
        lane.worker.send([job.item for job in lane.pending])
        self._flush(lane)

    def _flush(self, lane: _Lane) -> None:
        """Write what the pipe takes. Nobody waits for one that is full: its worker may be stopped."""
        requests = lane.worker.requests
        full = not lane.worker.flush()
        listed = requests in self._selector.get_map()
        if full and not listed:
            self._selector.register(requests, selectors.EVENT_WRITE, lane)
        elif listed and not full:
            self._selector.unregister(requests)

    def _listen(self, lane: _Lane) -> bool:
        """Take in what a worker says; False if it is gone."""
        records = lane.worker.receive()
        if records is None:
            self._bury(lane)
            return False

        for record in records:
            # Who speaks out of turn is no worker: something that runs in it writes where only the worker may.
            if not lane.pending or (record.status == READY) == lane.ready:
                lane.worker.kill_at_once()
                self._bury(lane)
                return False

            if record.status == READY:
                lane.ready = lane.proven = True
                lane.imported |= {job.item.verifier for job in lane.pending}
            else:
                status, reward, reason, parts = record
                verdict = Verdict(reward, STATUSES[status], reason, parts)  # type: ignore[arg-type]
                lane.pending.popleft().verdict.set_result(verdict)
            if lane.pending:
                self._count_begun(lane.pending[0])

        # Half a record is no sign of life.
        if records:
            lane.deadline = time.monotonic() + self._timeout_s if lane.pending else float("inf")
        return True

    def _count_begun(self, job: Job) -> None:
        if not job.begun:
            job.begun = True
            seconds, stats = time.monotonic() - job.submitted, self.stats
            stats.begun += 1
            stats.queue_s += seconds
            stats.queue_most_s = max(stats.queue_most_s, seconds)

    def _bury(self, lane: _Lane) -> None:
        """A worker died by itself: the job it was at is tried once more, the others are as new."""
        self.stats.restarts += 1  # before the last verdict of a step is out
        if lane.pending and lane.ready:
            suspect = lane.pending[0]
            if suspect.crashed:
                lane.pending.popleft().verdict.set_result(Verdict(0.0, "crash", "its process died, twice"))
            suspect.crashed = True
        elif lane.pending and not lane.proven:
            reason = lane.worker.failure()
            if reason is not None:  # it would be the same for every other
                raise UserError(f"reward worker cannot start: {reason}")
            lane.failure = "killed, perhaps for lack of memory"

    def _time_out(self, lane: _Lane) -> None:
        """A worker is silent for too long: that is a verdict on the job it is at, if it is at one."""
        self.stats.restarts += 1
        if lane.ready:
            reason = f"no verdict in {self._timeout_s:g} s"
            lane.pending.popleft().verdict.set_result(Verdict(0.0, "timeout", reason))
        else:
            lane.failure = f"no answer in {_START_S:g} s; is the machine overloaded?"

    def _replace(self, lane: _Lane) -> None:
        """End a worker and start another; the jobs that it had not begun come first again."""
        began = bool(lane.pending) or lane.proven
        self._queue.extendleft(reversed(lane.pending))
        self._end(lane)

        # One that never worked and had nothing to do is not missed before there is work.
        attempts = 0 if lane.proven else lane.attempts + 1
        if began and attempts < _START_ATTEMPTS:
            self._open(attempts)
        elif began:
            self._give_up(lane.failure)

    def _give_up(self, failure: str) -> None:
        """Go on without a worker that cannot be started, while there are others."""
        self._given_up += 1
        left = self._count - self._given_up
        if left <= 0:
            self._given_up = 0  # whoever tries again starts anew
            raise UserError(f"reward worker cannot start: {failure}")
        with contextlib.suppress(OSError):  # nobody reads the pipe any more
            text = f"a reward worker cannot start ({failure}): going on with {left} of {self._count}"
            print(text, file=sys.stderr, flush=True)

    def _end(self, lane: _Lane) -> None:
        # While its files are still open.
        for file in (lane.worker.requests, lane.worker.verdicts):
            if file in self._selector.get_map():
                self._selector.unregister(file)
        self._lanes.remove(lane)
        lane.worker.kill()

    def _cancel(self) -> None:
        while self._cancelled:
            self._drop(None)
            self._cancelled.popleft().set()

    def _drop(self, error: BaseException | None) -> None:
        """Every job fails, or is cancelled, and the workers go: half-read verdicts must not meet the next job."""
        jobs = [job for lane in self._lanes for job in lane.pending]
        for lane in list(self._lanes):
            self._end(lane)
        while self._queue:
            jobs.append(self._queue.popleft())
        for job in jobs:
            if error is None:
                job.verdict.cancel()
            else:
                job.verdict.set_exception(error)


class _Lane:
    """One worker and the jobs it has been given and has not answered."""

    def __init__(self, worker: WorkerProcess, attempts: int) -> None:
        self.worker, self.attempts = worker, attempts
        self.pending: deque[Job] = deque()
        self.imported: set[str] = set()  # verifiers
        self.ready = False  # has imported what these items need
        self.proven = False  # was ready before
        self.deadline = float("inf")
        self.failure = ""  # why it never got to work
