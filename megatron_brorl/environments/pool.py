"""A pool of worker processes that environments live in.

An environment stays in one process from `reset` to the end of its episode. If it raises, its episode ends with reward
0. If a call hangs or ends the process, all episodes of the process are lost, and a new process serves later episodes.
A class that a Python program passes runs in threads of this process instead, where a hang or a crash is not contained.

A worker with the calculator has 32 MB, and 0.4 MB more with 1,024 episodes: half of the 512 rollouts of 4 prompts. The
address space of a worker is limited to 4 GB.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_brorl.environments.episodes import Episodes
from megatron_brorl.environments.interface import Format
from megatron_brorl.errors import UserError
from megatron_brorl.rewards.worker_pool import MAX_FAILED_STARTS, score_result
from megatron_brorl.rewards.worker_process import WorkerLostError, WorkerProcess
from megatron_brorl.types import ScoreResult

_MAX_RUNNING = 64  # calls of one process at a time; the time limit of a call begins when the call is sent


@dataclass(frozen=True)
class Reply:
    """The reply of an environment to a turn, or to a reset."""

    messages: tuple[dict[str, str], ...]  # to append to the conversation; () if done
    done: bool  # the episode is over: score or lost is set
    score: ScoreResult | None
    calls: int = 0  # tool calls in this turn
    malformed: int = 0  # calls that could not be parsed, of an unknown tool, or with wrong arguments
    lost: str = ""  # "environment lost: " and the reason: the process hung or died


Send = Callable[[Reply], None]


class EnvironmentPool:
    """Environments by the number of their episode, which the caller chooses. A context manager, thread-safe.

    A reply is passed to a function, in a thread of the pool. Replies to ended episodes are dropped, also by `close`.
    An episode must have received its reply before its next step.
    """

    def __init__(self, factory: str | type, workers: int, max_tool_seconds: float, format: Format) -> None:
        """factory: "my_env.py:Class", or a class, which runs in this process. Check it with `describe` first.

        max_tool_seconds: time limit of a reset or step, which may contain several tool calls.
        """
        self._format = format
        self._closed = False
        self._workers: list[_Worker | _Threads]
        if isinstance(factory, str):
            self._workers = [_Worker(factory, max_tool_seconds) for _ in range(workers)]
        else:
            self._workers = [_Threads(factory)]

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def reset(self, episode: int, row: Mapping[str, Any], reply: Send) -> None:
        """Create an environment in the process with the fewest, and begin an episode on a data row.

        Raises UserError if processes have failed to start MAX_FAILED_STARTS times in a row.
        """
        self._check_open()
        worker = min(self._workers, key=lambda worker: len(worker.episodes))
        worker.call("reset", episode, (dict(row),), reply)

    def step(self, episode: int, text: str, last: bool, reply: Send) -> None:
        """Pass the text of a turn to the environment. last: the episode ends after this turn and is scored."""
        self._check_open()
        self._worker(episode).call("step", episode, (text, last, self._format), reply)

    def end(self, episode: int) -> None:
        """Drop an episode and its pending reply. Does nothing if it is over."""
        for worker in self._workers:
            worker.end(episode)

    def close(self) -> None:
        """Kill the processes."""
        if not self._closed:
            self._closed = True
            for worker in self._workers:
                worker.close()

    def _worker(self, episode: int) -> _Worker | _Threads:
        for worker in self._workers:
            if episode in worker.episodes:
                return worker
        raise KeyError(episode)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the environment pool is closed")


class _Threads:
    """Environments in this process, with a thread per call."""

    def __init__(self, cls: type) -> None:
        self.episodes: set[int] = set()
        self._environments = Episodes(cls)

    def call(self, method: str, episode: int, arguments: tuple[Any, ...], reply: Send) -> None:
        self.episodes.add(episode)
        threading.Thread(target=self._run, args=(method, episode, arguments, reply), daemon=True).start()

    def end(self, episode: int) -> None:
        self.episodes.discard(episode)
        self._environments.end(episode)

    def close(self) -> None:
        self.episodes.clear()

    def _run(self, method: str, episode: int, arguments: tuple[Any, ...], reply: Send) -> None:
        outcome = _reply(getattr(self._environments, method)(episode, *arguments))
        if episode not in self.episodes:
            self._environments.end(episode)  # The episode has ended while `reset` created its environment.
            return
        if outcome.done:
            self.episodes.discard(episode)
        reply(outcome)


@dataclass(eq=False)
class _Call:
    episode: int
    is_reset: bool
    message: bytes
    reply: Send
    deadline: float = math.inf  # set when the call is sent


class _Worker:
    """A worker process, the thread that starts it and exchanges messages with it, and its episodes.

    On Linux a process started with PR_SET_PDEATHSIG dies with the thread that started it.
    """

    def __init__(self, factory: str, seconds: float) -> None:
        # Why an episode is lost, or "". An episode stays here until its last reply.
        self.episodes: dict[int, str] = {}
        self._factory = factory
        self._seconds = seconds
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # guards episodes and the members below
        self._queue: deque[tuple[int, _Call]] = deque()  # calls to send, by number
        self._sent: dict[int, _Call] = {}  # calls without a reply, in the order of their deadlines
        self._ended: list[int] = []  # episodes whose environments the process has to drop
        self._process: WorkerProcess | None = None
        self._error: UserError | None = None  # set once the thread gives up
        self._closed = False
        self._wake, self._waker = os.pipe()
        for pipe in (self._wake, self._waker):
            os.set_blocking(pipe, False)
        # A daemon thread lets the program exit even if the pool was not closed.
        self._thread = threading.Thread(target=self._run, name="environments", daemon=True)
        self._thread.start()

    def call(self, method: str, episode: int, arguments: tuple[Any, ...], reply: Send) -> None:
        number = next(self._numbers)
        message = pickle.dumps((number, method, (episode, *arguments)), protocol=pickle.HIGHEST_PROTOCOL)
        with self._lock:
            if self._error:
                raise self._error
            if not self._closed:
                self.episodes.setdefault(episode, "")
                self._queue.append((number, _Call(episode, method == "reset", message, reply)))
                self._notify()

    def end(self, episode: int) -> None:
        with self._lock:
            if self.episodes.pop(episode, None) is not None and not self._closed:
                self._ended.append(episode)
                self._notify()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._process:
                self._process.stop()
        self._thread.join()
        for pipe in (self._wake, self._waker):
            os.close(pipe)

    def _notify(self) -> None:
        """Wake the thread. The caller holds the lock, and the pool is open."""
        with contextlib.suppress(BlockingIOError):  # The pipe is full of earlier notifications.
            os.write(self._waker, b"x")

    def _run(self) -> None:
        """Run a worker process, and start another one when it dies."""
        failed_starts = 0
        while failed_starts < MAX_FAILED_STARTS and not self._closed:
            failed_starts += 1
            reason = ""
            process = None
            try:
                process = WorkerProcess(self._factory, program="megatron_brorl.environments.worker")
                with self._lock:
                    self._process = process
                process.wait_until_ready()
                failed_starts = 0
                self._serve(process)
            except WorkerLostError as lost:
                reason = str(lost)
            except OSError as e:
                reason = f"{e.strerror}; is the machine overloaded?"
            with self._lock:
                self._process = None
            if process:
                process.close()
            if failed_starts == MAX_FAILED_STARTS:
                with self._lock:
                    self._error = UserError(f"environment {self._factory}: its process cannot start: {reason}")
            self._lose_all(reason)

    def _serve(self, process: WorkerProcess) -> None:
        """Exchange messages with the process until the pool is closed. Raises WorkerLostError."""
        while True:
            messages, lost = self._take()
            for call, reason in lost:
                call.reply(_lost(reason))
            if self._closed:
                return
            for message in messages:
                process.send(message, self._seconds)
            first = next(iter(self._sent.values()), None)
            wait = first.deadline - time.monotonic() if first else 60.0
            if wait <= 0:
                raise WorkerLostError(f"no answer in {self._seconds:g} s", during_call=True, timed_out=True)
            for result in process.results(wait, self._wake):
                self._deliver(result)

    def _take(self) -> tuple[list[bytes], list[tuple[_Call, str]]]:
        """Move calls from the queue to those that are sent. Return messages to send, and calls of lost episodes."""
        messages, lost = [], []
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 1 << 16)
        with self._lock:
            for episode in self._ended:
                messages.append(pickle.dumps((0, "end", (episode,))))
            self._ended.clear()
            while self._queue and len(self._sent) < _MAX_RUNNING:
                number, call = self._queue.popleft()
                reason = self.episodes.get(call.episode)
                if reason:
                    lost.append((call, reason))
                    del self.episodes[call.episode]
                elif reason is not None:
                    call.deadline = time.monotonic() + self._seconds
                    self._sent[number] = call
                    messages.append(call.message)
        return messages, lost

    def _deliver(self, result: Any) -> None:
        """Pass on the reply to a call. Raises WorkerLostError if the result is not a reply."""
        if not isinstance(result, list) or len(result) != 2 or type(result[0]) is not int:
            raise WorkerLostError("wrote a result that is not a reply", during_call=True)
        reply = _reply(result[1])
        with self._lock:
            call = self._sent.pop(result[0], None)
            if call is None:
                raise WorkerLostError("wrote a second reply to a call", during_call=True)
            live = call.episode in self.episodes
            if not live:
                self._ended.append(call.episode)  # again, because `reset` may have created its environment since
            elif reply.done:
                del self.episodes[call.episode]
        if live:
            call.reply(reply)

    def _lose_all(self, reason: str) -> None:
        """Mark all episodes of a dead process as lost, and reply to their calls."""
        with self._lock:
            waiting = set() if self._error else {call.episode for _, call in self._queue if call.is_reset}
            for episode in self.episodes.keys() - waiting:
                self.episodes[episode] = self.episodes[episode] or reason
            calls = [*self._sent.values()]
            self._sent.clear()
            if self._error:
                calls += [call for _, call in self._queue]
                self._queue.clear()
            self._ended.clear()
            calls = [] if self._closed else [c for c in calls if self.episodes.pop(c.episode, None) is not None]
        for call in calls:
            call.reply(_lost(reason))


def _lost(reason: str) -> Reply:
    return Reply((), True, None, lost=f"environment lost: {reason}")


def _reply(outcome: Any) -> Reply:
    """Return the reply in an Outcome. Raises WorkerLostError if it has not the form of one."""
    try:
        messages, done, score, calls, malformed = outcome
        texts = [text for message in messages for text in message.values()]
        if type(done) is bool and type(calls) is type(malformed) is int and all(type(text) is str for text in texts):
            return Reply(tuple(messages), done, score_result(score) if done else None, calls, malformed)
    except (TypeError, ValueError, AttributeError):
        pass
    raise WorkerLostError("wrote a result that is not a reply", during_call=True)
