"""Scoring in worker processes that can be killed.

Verifiers run on text that the policy wrote. One that hangs, crashes, raises or returns nonsense costs its answer the
reward and is counted; it never costs the step. Verdicts come in the order of the requests and do not depend on the
number of workers.
"""

from __future__ import annotations

import selectors
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.process import WorkerProcess
from megatron_brorl.rewards.protocol import READY, STATUSES, Item
from megatron_brorl.rewards.verifier import VerifierRow
from megatron_brorl.types import Prompt

Status = Literal["ok", "timeout", "error", "broken", "invalid", "crash", "no_answer"]

REGISTRY = "megatron_brorl.rewards.registry:verifier"
_START_S = 120.0  # for the imports of a worker
_START_ATTEMPTS = 3  # per worker
_CHUNK = 256  # items at most per message


@dataclass(frozen=True)
class ScoreRequest:
    """An answer to be scored."""

    prompt: Prompt
    answer: str | None  # None: the response holds no answer
    why: str = field(default="", compare=False)  # it holds none


@dataclass(frozen=True)
class Verdict:
    """The reward of one request; 0 unless the status is ok.

    timeout: took longer than the deadline. error: the verifier raised on the answer. broken: it raises on the prompt's
    reference answer too. invalid: it returned something other than a number in [0, 1]. crash: its process died, twice.
    no_answer: there was nothing to score.
    """

    reward: float
    status: Status
    reason: str = field(default="", compare=False)  # of error and broken: the exception's type and first line
    parts: Mapping[str, float] = field(default_factory=dict, compare=False)  # what the reward is made of


class RewardPool:
    """Worker processes behind one call. For use from one thread, with which they end; a context manager.

    resolve names the function that maps a verifier's name to the verifier, as "module:function" (tests give their own).
    stand_ins are what it is given in place of some names (registry.for_workers). impure are the names of verifiers that
    judge equal answers one by one.
    """

    def __init__(
        self,
        workers: int,
        timeout_s: float,
        memory_mb: int = 4096,
        resolve: str = REGISTRY,
        stand_ins: Mapping[str, str] = MappingProxyType({}),
        impure: frozenset[str] = frozenset(),
    ) -> None:
        self._count, self._timeout_s, self._memory_mb, self._resolve = workers, timeout_s, memory_mb, resolve
        self._stand_ins, self._impure = stand_ins, impure
        self._lanes: list[_Lane] = []
        self._closed = False
        self._failed_starts = 0
        self._open()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers."""
        self._closed = True
        self._kill()

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return [lane.worker.pid for lane in self._lanes]

    def score(self, requests: Sequence[ScoreRequest]) -> list[Verdict]:
        """One verdict per request, in order. A pure verifier scores equal answers to the same prompt once."""
        if self._closed:
            raise RuntimeError("the reward pool is closed")

        # One item for equal answers to a prompt, and the place of each request's item.
        index: dict[tuple[object, ...], int] = {}
        items: list[Item] = []
        places: list[int | None] = []
        rows: dict[int, VerifierRow] = {}  # of each prompt one object, which a message holds once
        for number, request in enumerate(requests):
            prompt, answer = request.prompt, request.answer
            if answer is None:
                places.append(None)  # costs no worker anything
                continue
            # A verdict is a function of these.
            # Metadata goes by identity: it has no hash, and the requests keep it alive until all are scored.
            key: tuple[object, ...] = (prompt.verifier, prompt.id, prompt.answer, id(prompt.metadata), answer)
            if prompt.verifier in self._impure:
                key = (number,)
            if key not in index:
                index[key] = len(items)
                name = self._stand_ins.get(prompt.verifier, prompt.verifier)
                items.append(Item(name, rows.setdefault(id(prompt), _row(prompt)), answer))
            places.append(index[key])

        # Workers that an earlier call lost are started again first.
        self._open()
        try:
            verdicts = _Run(self, items).verdicts()
        except BaseException:
            self._kill()  # half-read verdicts must not meet the next call
            raise

        # Back from items to requests.
        return [
            Verdict(0.0, "no_answer", request.why) if place is None else verdicts[place]
            for request, place in zip(requests, places, strict=True)
        ]

    def _open(self) -> None:
        while len(self._lanes) < self._count:
            self._lanes.append(_Lane(self._start()))

    def _start(self) -> WorkerProcess:
        return WorkerProcess(self._resolve, self._memory_mb)

    def _kill(self) -> None:
        for lane in self._lanes:
            lane.worker.kill()
        self._lanes.clear()


def _row(prompt: Prompt) -> VerifierRow:
    return VerifierRow(id=prompt.id, prompt=prompt.text, answer=prompt.answer, metadata=prompt.metadata)


class _Lane:
    """One worker and the items it has been given and has not answered."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.worker = worker
        self.pending: deque[int] = deque()
        self.ready = False  # has imported what these items need
        self.proven = False  # was ready before
        self.deadline = float("inf")


class _Run:
    """One call of RewardPool.score."""

    def __init__(self, pool: RewardPool, items: list[Item]) -> None:
        self._pool, self._items = pool, items
        self._queue = deque(range(len(items)))
        self._crashed_before: set[int] = set()
        self._verdicts: list[Verdict | None] = [None] * len(items)

    def verdicts(self) -> list[Verdict]:
        """One per item, in order."""
        lanes = self._pool._lanes
        with selectors.DefaultSelector() as selector:
            for lane in lanes:
                selector.register(lane.worker, selectors.EVENT_READ, lane)

            # Until every item has its verdict: keep all workers busy, listen to them until the next deadline.
            while self._queue or any(lane.pending for lane in lanes):
                for lane in lanes:
                    if self._queue and not lane.pending:
                        # Only to who has answered all: a worker that writes verdicts reads no items.
                        self._hand_out(lane)

                # Deadlines are measured from before listening, so that a verdict in the pipe is never too late.
                began = time.monotonic()
                wait = max(0.0, min(lane.deadline for lane in lanes) - began)
                heard = [key.data for key, _ in selector.select(wait)]

                # Who is gone or too slow is replaced; what it had not begun goes back to the front of the queue.
                for lane in lanes:
                    if lane in heard:
                        alive = self._listen(lane)  # which sets its next deadline
                    else:
                        alive = lane.deadline > began  # silent although its time was up before we listened
                        if not alive:
                            self._time_out(lane)
                    if not alive:
                        selector.unregister(lane.worker)  # while its file is still open
                        self._replace(lane)
                        selector.register(lane.worker, selectors.EVENT_READ, lane)

        # None is left by now; this is for the type checker.
        return [verdict for verdict in self._verdicts if verdict is not None]

    def _hand_out(self, lane: _Lane) -> None:
        size = min(_CHUNK, max(1, len(self._queue) // (4 * len(self._pool._lanes))))
        lane.pending.extend(self._queue.popleft() for _ in range(min(size, len(self._queue))))
        lane.ready, lane.deadline = False, time.monotonic() + _START_S
        lane.worker.send([self._items[i] for i in lane.pending])

    def _listen(self, lane: _Lane) -> bool:
        """Take in what a worker says; False if it is gone."""
        records = lane.worker.receive()
        if records is None:
            self._bury(lane)
            return False
        for status, reward, reason, parts in records:
            if status == READY:
                lane.ready = lane.proven = True
                self._pool._failed_starts = 0
            else:
                verdict = Verdict(reward, STATUSES[status], reason, parts)  # type: ignore[arg-type]
                self._verdicts[lane.pending.popleft()] = verdict
        lane.deadline = time.monotonic() + self._pool._timeout_s if lane.pending else float("inf")
        return True

    def _bury(self, lane: _Lane) -> None:
        """A worker died by itself: the item it was at is tried once more, the others are as new."""
        if lane.pending and lane.ready:
            suspect = lane.pending[0]
            if suspect in self._crashed_before:
                lane.pending.popleft()
                self._verdicts[suspect] = Verdict(0.0, "crash", "its process died, twice")
            self._crashed_before.add(suspect)
        elif lane.pending and not lane.proven:
            self._pool._failed_starts += 1
            reason = lane.worker.failure()
            if reason is not None or self._pool._failed_starts >= _START_ATTEMPTS * self._pool._count:
                raise UserError(f"reward worker cannot start: {reason or 'killed, perhaps for lack of memory'}")

    def _time_out(self, lane: _Lane) -> None:
        if not lane.ready:
            raise UserError(f"reward worker cannot start: no answer in {_START_S:.0f} s; is the machine overloaded?")
        self._verdicts[lane.pending.popleft()] = Verdict(0.0, "timeout", f"no verdict in {self._pool._timeout_s:g} s")

    def _replace(self, lane: _Lane) -> None:
        lane.worker.kill()
        self._queue.extendleft(reversed(lane.pending))
        lane.pending.clear()
        lane.worker, lane.ready, lane.proven, lane.deadline = self._pool._start(), False, False, float("inf")
