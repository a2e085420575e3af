"""Rollouts that alternate between the engine and a process: episodes of environments (turns) and runs of agents.

Every turn of the model is one request to the engine. While a process works on a rollout, the engine decodes others, so
no rollout waits for another one.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from megatron_brorl.rollout.engine import GenerateCallbacks, Request, RolloutEngine, Sampling, Supply
from megatron_brorl.types import Episode, Rollout, ScoreResult

if TYPE_CHECKING:
    from megatron_brorl.environments.pool import EnvironmentPool

_POLL_S = 0.05  # longest wait for a process before the caller is asked again whether the call is cancelled
_TAG_TOKENS = 16  # most tokens of <think> and the white space after it
_NUMBERS = count()  # of the rollouts of this process


@dataclass(eq=False)
class Running:
    """A rollout of a call of generate."""

    request: int  # index among the caller's requests
    rollout: Rollout  # Its episode is not None.
    number: int  # in the pool
    is_complete: bool = field(default=False, init=False)

    @property
    def episode(self) -> Episode:
        """The part of the rollout that comes from its process."""
        assert self.rollout.episode is not None
        return self.rollout.episode

    def update(self, **changes: Any) -> None:
        """Replace fields of the episode."""
        self.rollout = replace(self.rollout, episode=replace(self.episode, **changes))


R = TypeVar("R", bound=Running)


class Interaction(GenerateCallbacks, Supply, Generic[R]):
    """One call of generate: the callbacks and the supply of the engine.

    Only the generating thread uses it. Other threads put events into a queue.
    """

    def __init__(
        self,
        pool: EnvironmentPool,
        requests: Sequence[Request],
        sampling: Sampling,
        callbacks: GenerateCallbacks | None,
        supply: Supply | None,
    ) -> None:
        self.pool = pool
        self.sampling = sampling
        self.callbacks = callbacks
        self.supply = supply
        self.requests = list(requests)
        self.rows = sum(r.n for r in requests) + (supply.rows if supply else 0)
        self.prompt_tokens = max([supply.prompt_tokens if supply else 0, *(len(r.prompt.token_ids) for r in requests)])
        self.rollouts: list[R] = []
        self.waiting: set[R] = set()  # for their processes
        self.ready: deque[Any] = deque()  # turns for the engine
        self.events: SimpleQueue[tuple[R, Any]] = SimpleQueue()
        self._not_begun = deque(self._initial(0, requests))
        self._lost: list[str] = []  # reasons

    def generate(self, engine: RolloutEngine, turn_tokens: int, name: str) -> list[list[Rollout]]:
        """Return the rollouts of each request of the caller, by index. name: of the environment or agent."""
        try:
            # Sampling.turn_tokens also keeps the last bits independent of the time at which requests arrive.
            engine.generate([], replace(self.sampling, turn_tokens=turn_tokens), self, self)
        finally:
            self.receive()
            for running in [running for running in self.rollouts if not running.is_complete]:
                self.pool.end(running.number)
                self.end(running)
            if self._lost:
                text = f"{name}: {len(self._lost)} rollouts are lost, for example: {self._lost[0]}"
                print(f"warning: {text}", file=sys.stderr, flush=True)
        results: list[list[Rollout]] = [[] for _ in self.requests]
        for running in self.rollouts:
            results[running.request].append(running.rollout)
        return [sorted(rollouts, key=lambda r: r.index) for rollouts in results]

    @abstractmethod
    def start(self, request: int, rollout: Rollout, number: int) -> R:
        """Start the process of a rollout."""

    @abstractmethod
    def handle(self, running: R, event: Any) -> None:
        """Handle an event of a process."""

    @abstractmethod
    def end(self, running: R) -> None:
        """Handle the end of an unfinished rollout whose call has ended."""

    def has_more(self) -> bool:
        """See Supply."""
        if self.waiting and not self.ready:
            self.receive(_POLL_S)
        return bool(self.waiting or self.ready or self._not_begun or (self.supply and self.supply.has_more()))

    def cancelled(self) -> bool:
        """See GenerateCallbacks."""
        self.receive()
        return self.callbacks is not None and self.callbacks.cancelled()

    def begin(self, most: int) -> None:
        """Start the processes of at most `most` further rollouts."""
        if most > 0 and not self._not_begun and self.supply is not None:
            new = self.supply.next_requests(most)
            self._not_begun.extend(self._initial(len(self.requests), new))
            self.requests += new
        for _ in range(min(most, len(self._not_begun))):
            running = self.start(*self._not_begun.popleft(), next(_NUMBERS))
            self.rollouts.append(running)
            self.waiting.add(running)

    def receive(self, seconds: float = 0.0) -> None:
        """Handle the events that have arrived. Wait at most `seconds` for the first one."""
        with suppress(Empty):
            item = self.events.get(bool(seconds), seconds)
            while True:
                self.handle(*item)
                item = self.events.get_nowait()

    def complete(self, running: R) -> None:
        """Pass a complete rollout to the caller."""
        running.is_complete = True
        if self.callbacks is not None:
            self.callbacks.finished(running.request, running.rollout)

    def lose(self, running: R, reason: str) -> None:
        """Complete a rollout as "cut", with the reason in its score."""
        running.is_complete = True
        self._lost.append(reason)
        running.update(score=ScoreResult(0.0, "crash", reason))
        running.rollout = replace(running.rollout, finish="cut")

    def _initial(self, first: int, requests: Sequence[Request]) -> Iterable[tuple[int, Rollout]]:
        empty = Episode(torch.empty(0, dtype=torch.bool), turns=0)
        for i, request in enumerate(requests, start=first):
            yield from ((i, replace(rollout, episode=empty)) for rollout in request.rollouts())


def in_thought(decode: Callable[[Sequence[int]], str], context: Sequence[int]) -> bool:
    """Return whether the tokens before a turn end with <think>."""
    return decode(context[-_TAG_TOKENS:]).rstrip().endswith("<think>")
