"""A pool of worker processes that environments live in, or that agents run in.

An environment stays in one process from `reset` to the end of its episode. If it raises, the episode ends with reward
0. If a call hangs or ends the process, all episodes of the process are lost, and a new process serves later episodes.
A class that a Python program passes runs in threads of this process instead, where a hang or a crash is not contained.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from pydantic import TypeAdapter

from megatron_brorl.environments.agents import Agents
from megatron_brorl.environments.episodes import Episodes, Outcome
from megatron_brorl.environments.interface import Format
from megatron_brorl.errors import UserError
from megatron_brorl.rewards.worker_main import READY, json_line
from megatron_brorl.rewards.worker_pool import ScoreRequest, score_result
from megatron_brorl.rewards.worker_process import EXIT_S, START_S, WorkerLostError, end_reason, environment
from megatron_brorl.types import ScoreResult

# Concurrent calls per process. The time limit of a call begins when the call is sent. A call of Agents is a rollout.
_MAX_RUNNING = {Episodes: 64, Agents: 256}
_MEMORY_MB = {Episodes: 4096, Agents: 1 << 30}  # address space of a process; agents have no limit
_MAX_FAILED_STARTS = 3
_MAX_LINE = 1 << 20  # bytes of a result
_RESULT = TypeAdapter(tuple[int, Outcome])  # a worker writes the number of a call and its outcome


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


@dataclass(eq=False)
class EnvironmentPool:
    """Environments by the number of their episode, which the caller chooses. Thread-safe.

    A reply is passed to a function, in the thread of the pool. After `end` or `close`, replies are dropped.
    """

    # "my_env.py:Class", or a class, which runs in this process. Check it with `describe` first.
    factory: str | Callable[..., Any]
    workers: int
    max_tool_seconds: float  # time limit of a reset or step, which may contain several tool calls, or of an agent
    format: Format = "hermes"
    kind: type[Any] = Episodes  # Agents if the factory is an agent

    def __post_init__(self) -> None:
        self._closed = False
        # Only the thread of the loop uses the processes and the episodes.
        self._processes: list[_Process | _Threads | None]
        self._processes = [None] * (self.workers if isinstance(self.factory, str) else 1)
        self._semaphores = [asyncio.Semaphore(_MAX_RUNNING[self.kind]) for _ in self._processes]
        self._episodes: dict[int, _Episode] = {}
        self._failed_starts: list[str] = []  # reasons why the last processes could not start
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(_MAX_RUNNING[self.kind]))
        # A daemon thread lets the program exit even if the pool was not closed.
        self._thread = threading.Thread(target=self._loop.run_forever, name="environments", daemon=True)
        self._thread.start()

    def reset(self, episode: int, row: Mapping[str, Any], reply: Send) -> None:
        """Create an environment and begin an episode on a data row.

        Raises UserError if processes have failed to start _MAX_FAILED_STARTS times in a row.
        """
        self._begin(episode, reply, "reset", dict(row))

    def run(self, episode: int, row: Mapping[str, Any], *arguments: Any, reply: Send) -> None:
        """Run an agent on a data row, see Agents.run. Raises UserError as `reset` does."""
        self._begin(episode, reply, "run", dict(row), *arguments)

    def step(self, episode: int, text: str, last: bool, reply: Send, in_thought: bool = False) -> None:
        """Pass a turn to the environment. last: the episode ends with it and is scored. in_thought: see find_calls."""
        self._submit(self._call(episode, reply, "step", text, last, self.format, in_thought))

    def play(self, requests: Sequence[ScoreRequest]) -> list[ScoreResult]:
        """Return the score of an episode for each request, whose answer is the only turn. No other episode may run."""
        scores = []
        for number, request in enumerate(requests):
            replies: SimpleQueue[Reply] = SimpleQueue()
            self.reset(number, request.prompt.row(), replies.put)
            if not (reply := replies.get()).done:
                self.step(number, request.answer or "", last=True, reply=replies.put)
                reply = replies.get()
            scores.append(reply.score or ScoreResult(0.0, "crash", reply.lost))
        return scores

    def end(self, episode: int) -> None:
        """Drop an episode and its pending reply. Does nothing if it is over."""
        self._submit(self._end(episode))

    def close(self) -> None:
        """Kill the processes."""
        if not self._closed:
            self._closed = True
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _begin(self, episode: int, reply: Send, method: str, *arguments: Any) -> None:
        if len(self._failed_starts) >= _MAX_FAILED_STARTS:
            raise UserError(f"{self.factory}: its process cannot start: {self._failed_starts[-1]}")
        self._submit(self._create(episode, reply, method, *arguments))

    def _submit(self, call: Coroutine[Any, Any, None]) -> None:
        if self._closed:
            call.close()
            raise RuntimeError("the environment pool is closed")
        self._loop.call_soon_threadsafe(self._loop.create_task, call)

    async def _create(self, number: int, send: Send, method: str, *arguments: Any) -> None:
        self._episodes[number] = _Episode()
        await self._call(number, send, method, *arguments)

    async def _call(self, number: int, send: Send, method: str, *arguments: Any) -> None:
        episode = self._episodes.get(number)
        if episode is None:
            return
        process_index = number % len(self._processes)
        async with episode.lock, self._semaphores[process_index]:
            if number not in self._episodes:
                return
            episode.process = episode.process or self._live_process(process_index)
            try:
                reply = await episode.process.call(method, number, *arguments)
            except WorkerLostError as e:
                reply = Reply(messages=(), done=True, score=None, lost=f"environment lost: {e}")
        if number in self._episodes:
            if reply.done:
                del self._episodes[number]
            send(reply)

    async def _end(self, number: int) -> None:
        episode = self._episodes.pop(number, None)
        if episode:
            if self.kind is Agents and episode.process:
                episode.process.end(number)  # ends the call
                return
            async with episode.lock:  # A running call may still create the environment.
                if episode.process:
                    episode.process.end(number)

    def _live_process(self, process_index: int) -> _Process | _Threads:
        process = self._processes[process_index]
        if process is None or process.lost:
            if isinstance(self.factory, str):
                process = _Process(self.factory, self.max_tool_seconds, self._failed_starts, self.kind)
            else:
                process = _Threads(self.kind(self.factory))
            self._processes[process_index] = process
        return process

    async def _stop(self) -> None:
        self._episodes.clear()
        for process in self._processes:
            if isinstance(process, _Process):
                await process.kill()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(eq=False)
class _Episode:
    process: _Process | _Threads | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by the call of the episode


class _Process:
    """A worker process (environments.worker_main)."""

    def __init__(self, factory: str, seconds: float, failed_starts: list[str], kind: type[Any]) -> None:
        """failed_starts: receives the reason if the process cannot start, and is cleared otherwise."""
        self._kind = kind
        self.lost = ""  # the reason why the process has ended
        self._factory = factory
        self._seconds = seconds
        self._failed_starts = failed_starts
        self._process: asyncio.subprocess.Process | None = None
        self._numbers = itertools.count(1)  # of calls; 0: a call of `end`, which has no reply
        self._waiting: dict[int, asyncio.Future[Reply]] = {}  # by number of the call
        self._ready = asyncio.Event()  # also set if the process is lost
        self._life = asyncio.create_task(self._run())

    async def call(self, method: str, *arguments: Any) -> Reply:
        """Call a method of Episodes in the process. Raises WorkerLostError."""
        await self._ready.wait()
        if not self.lost:
            number = next(self._numbers)
            reply = self._waiting[number] = asyncio.get_running_loop().create_future()
            self._send(number, method, arguments)
            try:
                return await asyncio.wait_for(reply, self._seconds)
            except asyncio.TimeoutError:
                self._lose(f"no answer in {self._seconds:g} s")
        raise WorkerLostError(self.lost, during_call=True)

    def end(self, number: int) -> None:
        """Drop the environment of an episode."""
        if not self.lost:
            self._send(number=0, method="end", arguments=(number,))

    async def kill(self) -> None:
        """Kill the process and all processes that it has started."""
        self._lose("the pool was closed")
        if self._process:
            await self._process.wait()

    def _send(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        assert self._process
        assert self._process.stdin
        self._process.stdin.write(pickle.dumps((number, method, arguments)))

    async def _run(self) -> None:
        """Start the process, and pass on its results until it ends."""
        # HTTP clients connect to the loopback interface directly.
        no_proxy = {name: f"{os.environ.get(name, '')},127.0.0.1".lstrip(",") for name in ("NO_PROXY", "no_proxy")}
        with tempfile.TemporaryFile() as stderr:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "megatron_brorl.environments.worker_main"),
                    *(self._kind.__name__, self._factory, str(_MEMORY_MB[self._kind]), str(os.getpid())),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=stderr,
                    env={**environment(), **no_proxy},
                    start_new_session=True,  # The terminal's Ctrl-C is meant for the trainer.
                    limit=_MAX_LINE,
                )
                assert self._process.stdout
                if await asyncio.wait_for(self._process.stdout.readline(), START_S) == json_line(READY):
                    self._failed_starts.clear()
                    self._ready.set()
                    while line := await self._process.stdout.readline():
                        number, outcome = _RESULT.validate_json(line, strict=True)
                        self._waiting.pop(number).set_result(_reply(outcome, self._kind))
                self._lose(end_reason(await asyncio.wait_for(self._process.wait(), EXIT_S), stderr))
            except asyncio.TimeoutError:
                self._lose("does not start, or has closed its pipe")
            except OSError as e:
                self._lose(f"{e.strerror}; is the machine overloaded?")
            except (ValueError, KeyError, WorkerLostError):
                self._lose("wrote a result that is not a reply")

    def _lose(self, reason: str) -> None:
        """Kill the process, and let its calls raise WorkerLostError."""
        if self.lost:
            return
        self.lost = reason
        if self._process and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if not self._ready.is_set():
            self._failed_starts.append(reason)
            self._ready.set()
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(WorkerLostError(reason, during_call=True))


class _Threads:
    """Environments or agents in this process, with a thread per call."""

    lost = ""

    def __init__(self, environments: Episodes | Agents) -> None:
        self._environments = environments
        self.end = environments.end

    async def call(self, method: str, *arguments: Any) -> Reply:
        outcome = await asyncio.to_thread(getattr(self._environments, method), *arguments)
        return _reply(outcome, type(self._environments))


def _reply(outcome: Outcome, kind: type[Any]) -> Reply:
    """Return the reply in an outcome. Raises WorkerLostError if no Judge could have returned its score."""
    is_verified = kind is Agents and outcome.score is None  # by the verifier of the row
    score = score_result(outcome.score) if outcome.done and not is_verified else None
    return Reply(tuple(outcome.messages), outcome.done, score, outcome.calls, outcome.malformed)
