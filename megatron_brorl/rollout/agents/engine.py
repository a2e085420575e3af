"""Rollouts of agents: functions that call the policy through an OpenAI-compatible endpoint.

A worker process runs the function. Each of its calls becomes a request to the engine, which decodes the calls of many
rollouts together. When the function returns, the rollout is complete: its sequences (sequences.py) one after the
other, with the function's score or the text that a verifier scores. Random numbers are keyed by the tokens of a call,
so that they do not depend on the order in which calls arrive.
"""

from __future__ import annotations

import secrets
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from megatron_brorl.config.schema import AgentConfig
from megatron_brorl.ops.philox import stream_key
from megatron_brorl.rollout.agents.sequences import Call, Continue, Render, Sequences, tokens
from megatron_brorl.rollout.agents.server import MODEL, AgentServer, Endpoint, Limits
from megatron_brorl.rollout.engine import GenerateCallbacks, Request, RolloutEngine, Sampling, Supply
from megatron_brorl.types import Episode, FinishReason, Prompt, Rollout, ScoreResult

if TYPE_CHECKING:
    from megatron_brorl.environments.pool import EnvironmentPool, Reply

GRACE_S = 10.0  # seconds after agent.max_seconds until the process of a function that is not async is killed
_POLL_S = 0.05  # longest wait for a call before the caller is asked again whether generate is cancelled
_NUMBERS = count()  # of the rollouts of this process


@dataclass
class AgentEngine:
    """A RolloutEngine whose rollouts are runs of an agent. Methods other than generate are the engine's."""

    engine: RolloutEngine
    pool: EnvironmentPool
    server: AgentServer
    config: AgentConfig
    limits: Limits
    render: Render
    proceed: Continue
    warned: set[str] = field(default_factory=set)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        callbacks: GenerateCallbacks | None = None,
        supply: Supply | None = None,
    ) -> list[list[Rollout]]:
        """See RolloutEngine. Rollouts have an Episode with the starts of their sequences.

        A rollout whose process is lost, or whose agent made no call, is returned as "cut" with the reason in its score.
        """
        # Weight sync compares log-probabilities on random prompts, which no agent answers.
        if sampling.shares_prefixes:
            return self.engine.generate(requests, sampling, callbacks, supply)
        call = _Generation(self, requests, sampling, callbacks, supply)
        try:
            # As for turns, equal lengths in a batch keep the last bits independent of the time of a call.
            self.engine.generate([], replace(sampling, turn_tokens=sampling.max_tokens), call, call)
        finally:
            call.close()
        return call.results()

    def warn(self, text: str) -> None:
        """Print a warning once in a run."""
        if text not in self.warned:
            self.warned.add(text)
            print(f"warning: {text}", file=sys.stderr, flush=True)


@dataclass
class FixedText:
    """An engine that gives the same completion to every call, for the trial of an agent."""

    ids: list[int]
    stop_id: int

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, callbacks: GenerateCallbacks, supply: Supply
    ) -> list[list[Rollout]]:
        """See RolloutEngine."""
        count = 0
        while supply.has_more():
            for request in supply.next_requests(8):
                ids = torch.tensor([*self.ids, self.stop_id][: request.max_tokens])
                finish: FinishReason = "length" if len(ids) <= len(self.ids) else "stop"
                callbacks.finished(count, Rollout(0, ids, torch.zeros(len(ids)), finish, ((0, len(ids)),)))
                count += 1
        return []


@dataclass(eq=False)
class _Running:
    """A rollout of a call of generate."""

    request: int  # index among the caller's requests
    number: int  # of the rollout in the pool
    index: int  # among the siblings of its prompt
    key: str  # API key
    endpoint: Endpoint
    withdrawn: threading.Event = field(default_factory=threading.Event)
    calls: list[Call] = field(default_factory=list)  # that have arrived
    rollout: Rollout | None = None  # when the agent has ended


class _Generation:
    """One call of generate: the callbacks and the supply of the engine, which samples the calls of agents.

    Only the generating thread uses it, except for `_queue`.
    """

    def __init__(
        self,
        owner: AgentEngine,
        requests: Sequence[Request],
        sampling: Sampling,
        callbacks: GenerateCallbacks | None,
        supply: Supply | None,
    ) -> None:
        self.owner, self.sampling, self.callbacks, self.supply = owner, sampling, callbacks, supply
        self.requests = list(requests)
        self.rows = sum(r.n for r in requests) + (supply.rows if supply else 0)
        self.prompt_tokens = owner.limits.prompt_tokens

        self._not_begun = deque((i, rollout.index) for i, r in enumerate(requests) for rollout in r.rollouts())
        self._rollouts: list[_Running] = []
        self._running: set[_Running] = set()
        self._ready: deque[tuple[_Running, Call]] = deque()  # for the engine
        self._sent: list[Call] = []  # by index of the engine's request
        self._queue: SimpleQueue[tuple[_Running, Call | Reply]] = SimpleQueue()
        self._lost: list[str] = []  # reasons

    def next_requests(self, room: int) -> list[Request]:
        self._receive()
        ready = [self._ready.popleft() for _ in range(min(room, len(self._ready)))]
        # Agents that have not called yet will need room.
        self._begin(room - len(ready) - sum(not running.calls for running in self._running))
        self._sent += [call for _, call in ready]
        return [self._request(*pair) for pair in ready]

    def has_more(self) -> bool:
        if self._running and not self._ready:
            self._receive(_POLL_S)
        return bool(self._running or self._ready or self._not_begun or (self.supply and self.supply.has_more()))

    def cancelled(self) -> bool:
        self._receive()
        return self.callbacks is not None and self.callbacks.cancelled()

    def finished(self, request: int, rollout: Rollout) -> None:
        """Pass a completion to the endpoint."""
        call = self._sent[request]
        call.ids, call.log_probs, call.finish = rollout.token_ids, rollout.log_probs, rollout.finish
        call.stopped = int(rollout.token_ids[-1]) in self.sampling.stop_ids
        call.version = rollout.spans[-1][0]
        call.done()

    def close(self) -> None:
        """End the agents whose rollouts are unfinished, and print a line about lost ones."""
        self._receive()
        for running in list(self._running):
            self.owner.pool.end(running.number)
            self._end(running)
        if self._lost:
            name = self.owner.config.function
            text = f"{name}: {len(self._lost)} rollouts are lost, for example: {self._lost[0]}"
            print(f"warning: {text}", file=sys.stderr, flush=True)

    def results(self) -> list[list[Rollout]]:
        """Return the rollouts of each request of the caller, by index, without those that have no tokens."""
        results: list[list[Rollout]] = [[] for _ in self.requests]
        for running in self._rollouts:
            if running.rollout is not None:
                results[running.request].append(running.rollout)
        return [sorted(rollouts, key=lambda r: r.index) for rollouts in results]

    def _request(self, running: _Running, call: Call) -> Request:
        prompt = Prompt(self.requests[running.request].prompt.id, "", tuple(call.prompt_ids), None, "none")
        withdrawn = running.withdrawn
        return Request(prompt, call.key, 1, max_tokens=call.limit, stop_strings=call.stop, withdrawn=withdrawn)

    def _begin(self, most: int) -> None:
        """Start the agents of at most `most` further rollouts."""
        if most > 0 and not self._not_begun and self.supply is not None:
            for request in self.supply.next_requests(most):
                self._not_begun.extend((len(self.requests), rollout.index) for rollout in request.rollouts())
                self.requests.append(request)
        for _ in range(min(most, len(self._not_begun))):
            self._start(*self._not_begun.popleft())

    def _start(self, number: int, index: int) -> None:
        owner = self.owner
        request = self.requests[number]
        sequences = Sequences(owner.render, owner.proceed, owner.config.history, stream_key(request.key, index))
        values = {"temperature": self.sampling.temperature, "top_p": self.sampling.top_p}

        def put(item: Call | Reply) -> None:
            self._queue.put((running, item))

        endpoint = Endpoint(sequences, owner.limits, values, put, owner.warn)
        running = _Running(number, next(_NUMBERS), index, secrets.token_hex(16), endpoint)
        self._rollouts.append(running)
        self._running.add(running)
        owner.server.endpoints[running.key] = endpoint
        arguments = owner.server.url, running.key, MODEL, owner.config.max_seconds
        owner.pool.run(running.number, request.prompt.row(), *arguments, reply=put)

    def _receive(self, seconds: float = 0.0) -> None:
        """Handle the calls and results that have arrived. Wait at most `seconds` for the first one."""
        with suppress(Empty):
            running, item = self._queue.get(bool(seconds), seconds)
            while True:
                if isinstance(item, Call):
                    running.calls.append(item)
                    self._ready.append((running, item))
                else:
                    self._complete(running, item)
                running, item = self._queue.get_nowait()

    def _complete(self, running: _Running, reply: Reply) -> None:
        """Make the rollout of an agent that has ended, and deliver it."""
        self._end(running)
        sequences = running.endpoint.sequences
        rows = sequences.rows()
        if reply.lost or not rows:
            why = reply.score.reason if reply.score and reply.score.reason else "it returned"
            reason = reply.lost or f"the agent made no call: {why}"
            self._lost.append(reason)
            ids, log_probs, sampled, *_ = tokens([])
            episode = Episode(sampled, turns=0, score=ScoreResult(0.0, "crash", reason))
            running.rollout = Rollout(running.index, ids, log_probs, "cut", (), episode)
            return
        ids, log_probs, sampled, starts, spans = tokens(rows)
        calls = [call for row in rows for call in row]
        text = None
        if reply.score is None:
            first = next((row for row in rows if sequences.calls[0] in row), rows[0])
            text = reply.messages[0]["content"] if reply.messages else str(first[-1].reply["content"])
        tool_calls = sum(len(call.reply.get("tool_calls", ())) for call in calls)
        episode = Episode(sampled, len(calls), tool_calls, score=reply.score, starts=starts, text=text)
        running.rollout = Rollout(running.index, ids, log_probs, "stop", spans, episode)
        if self.callbacks is not None:
            self.callbacks.finished(running.request, running.rollout)

    def _end(self, running: _Running) -> None:
        """Let the key of a rollout expire, and withdraw its unanswered calls."""
        self._running.discard(running)
        self.owner.server.endpoints.pop(running.key, None)
        running.withdrawn.set()
        self._ready = deque(pair for pair in self._ready if pair[0] is not running)
        for call in running.calls:
            if call.finish == "cut":
                call.done()
