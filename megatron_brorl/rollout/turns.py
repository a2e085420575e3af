"""Rollouts that alternate between the engine and a process: episodes of environments (turns) and runs of agents.

Every turn of the model is one request to the engine. While a process works on a rollout, the engine decodes other
rollouts. When a turn of an episode ends, a process of the environment pool runs its tool calls. Then the
rollout continues from its tokens and the tokens of the observation. Random numbers are keyed by the position of a token
in its rollout, so tokens depend neither on the batch nor on the time of a reply. Runs of agents are in agents/.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from megatron_brorl.config.schema import EnvironmentConfig
from megatron_brorl.errors import warn
from megatron_brorl.rewards.registry import ENVIRONMENT
from megatron_brorl.rollout.engine import GenerateCallbacks, Request, RolloutEngine, Sampling, Supply, extend_spans
from megatron_brorl.types import Episode, Rollout, ScoreResult

if TYPE_CHECKING:
    from megatron_brorl.environments.pool import EnvironmentPool, Reply

_POLL_S = 0.05  # longest wait for a process before the caller is asked again whether the call is cancelled
_TAG_TOKENS = 16  # most tokens of <think> and the white space after it
_NUMBERS = count()  # of the rollouts of this process


@dataclass(eq=False)
class Running:
    """A rollout of a call of generate."""

    request: int  # index among the caller's requests
    rollout: Rollout  # Its episode is not None.
    number: int  # of its episode or run in the pool
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


@dataclass(eq=False)
class Interaction(GenerateCallbacks, Supply, Generic[R]):
    """One call of generate: the callbacks and the supply of the engine.

    Only the generating thread uses it. Other threads put events into a queue.
    """

    pool: EnvironmentPool
    name: str  # of the environment or agent, for messages
    requests: list[Request]  # requests of the caller, then requests of the supply
    sampling: Sampling
    callbacks: GenerateCallbacks | None
    supply: Supply | None

    def __post_init__(self) -> None:
        requests, supply = self.requests, self.supply
        self.requests = [*requests]
        self.rows = sum(r.n for r in requests) + (supply.rows if supply else 0)
        self.prompt_tokens = max([supply.prompt_tokens if supply else 0, *(len(r.prompt.token_ids) for r in requests)])
        self.rollouts: list[R] = []
        self.waiting: set[R] = set()  # for their processes
        self.ready: deque[Any] = deque()  # turns for the engine
        self.events: SimpleQueue[tuple[R, Any]] = SimpleQueue()
        self._not_begun = deque(self._initial(0, requests))  # (index of the request, initial rollout)
        self._lost: list[str] = []  # the reasons why rollouts are lost

    def generate(self, engine: RolloutEngine) -> list[list[Rollout]]:
        """Return the rollouts of each request of the caller, by index."""
        try:
            # Sampling.turn_tokens also keeps the last bits independent of the time at which requests arrive.
            engine.generate([], replace(self.sampling, turn_tokens=self.sampling.max_tokens), self, self)
        finally:
            self.receive()
            for running in [running for running in self.rollouts if not running.is_complete]:
                self.pool.end(running.number)
                self.end(running)
            if self._lost:
                warn(f"{self.name}: {len(self._lost)} rollouts are lost, for example: {self._lost[0]}")
        results: list[list[Rollout]] = [[] for _ in self.requests]
        for running in self.rollouts:
            results[running.request].append(running.rollout)
        return [sorted(rollouts, key=lambda rollout: rollout.index) for rollouts in results]

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
        if self.waiting and not self.ready:
            self.receive(_POLL_S)
        return bool(self.waiting or self.ready or self._not_begun or (self.supply and self.supply.has_more()))

    def cancelled(self) -> bool:
        self.receive()
        return self.callbacks is not None and self.callbacks.cancelled()

    def begin(self, limit: int) -> None:
        """Start the processes of at most `limit` further rollouts."""
        if limit > 0 and not self._not_begun and self.supply is not None:
            new = self.supply.next_requests(limit)
            self._not_begun.extend(self._initial(len(self.requests), new))
            self.requests += new
        for _ in range(min(limit, len(self._not_begun))):
            running = self.start(*self._not_begun.popleft(), next(_NUMBERS))
            self.rollouts.append(running)
            self.waiting.add(running)

    def receive(self, seconds: float = 0.0) -> None:
        """Handle the events that have arrived. Wait at most `seconds` for the first one."""
        with suppress(Empty):
            item = self.events.get(block=bool(seconds), timeout=seconds)
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


@dataclass
class ProcessEngine:
    """A RolloutEngine whose rollouts alternate between `engine` and a process. It passes other calls to `engine`."""

    engine: RolloutEngine
    pool: EnvironmentPool

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        callbacks: GenerateCallbacks | None = None,
        supply: Supply | None = None,
    ) -> list[list[Rollout]]:
        """See RolloutEngine. Rollouts have an Episode.

        A rollout whose process is lost is returned as "cut" with the reason in its score.
        """
        interaction = self.interaction(requests, sampling, callbacks, supply)
        if interaction is None:
            return self.engine.generate(requests, sampling, callbacks, supply)
        return interaction.generate(self.engine)

    @abstractmethod
    def interaction(self, requests: Sequence[Request], sampling: Sampling, *others: Any) -> Interaction[Any] | None:
        """Return the interaction of a call of generate, or None for the random prompts of weight sync."""


@dataclass
class TurnEngine(ProcessEngine):
    """An engine whose rollouts are episodes of an environment. Their max_tokens include the tokens of observations."""

    config: EnvironmentConfig
    decode: Callable[[Sequence[int]], str]  # tokens of a turn, without its stop token -> text
    # (messages that answer a turn, whether the turn has a stop token) -> the tokens that follow the turn
    encode: Callable[[Sequence[dict[str, str]], bool], list[int]]

    def interaction(self, requests: Sequence[Request], sampling: Sampling, *others: Any) -> Interaction[Any] | None:
        if requests and requests[0].prompt.verifier != ENVIRONMENT:
            return None
        return _Episodes(self, requests, sampling, *others)


class _Episodes(Interaction[Running]):
    """The episodes of one call of generate. The finish of an incomplete rollout is that of its last turn."""

    def __init__(self, owner: TurnEngine, *arguments: Any) -> None:
        super().__init__(owner.pool, owner.config.factory, *arguments)
        self.owner = owner
        self._turns: list[Running] = []  # by index of the engine's request
        self._resets = 0  # waiting episodes whose first turn has not begun

    def next_requests(self, room: int) -> list[Request]:
        self.receive()
        # Rollouts that continue come first, so that few environments exist at a time.
        ready = [self.ready.popleft() for _ in range(min(room, len(self.ready)))]
        self.begin(room - len(ready) - self._resets)
        self._turns += ready
        turns = []
        for running in ready:
            request, begun = self.requests[running.request], running.rollout
            # A rollout without tokens is not a continued rollout, so siblings share the state of their prompt.
            continued = (begun,) if len(begun.token_ids) else ()
            turns.append(Request(request.prompt, request.key, n=1, first=begun.index, begun=continued))
        return turns

    def start(self, request: int, rollout: Rollout, number: int) -> Running:
        running = Running(request, rollout, number)
        self._resets += 1
        self._ask(running, self.pool.reset, self.requests[request].prompt.row())
        return running

    def finished(self, request: int, rollout: Rollout) -> None:
        """Send the text of a turn to its environment."""
        running = self._turns[request]
        episode = running.episode
        begin = len(episode.sampled)
        new = torch.ones(len(rollout.token_ids) - begin, dtype=torch.bool)
        running.rollout = replace(rollout, episode=episode)
        running.update(sampled=torch.cat((episode.sampled, new)), turns=episode.turns + 1)
        ids = rollout.token_ids[begin:].tolist()
        if ids[-1] in self.sampling.stop_ids:
            ids.pop()
        last = rollout.finish == "length" or running.episode.turns == self.owner.config.max_turns
        context = [*self.requests[running.request].prompt.token_ids, *rollout.token_ids[:begin].tolist()]
        thinks = in_thought(self.owner.decode, context)
        self._ask(running, self.pool.step, self.owner.decode(ids), last, in_thought=thinks)

    def end(self, running: Running) -> None:
        running.rollout = replace(running.rollout, finish="cut")

    def _ask(self, running: Running, call: Callable[..., None], *arguments: Any, **options: Any) -> None:
        self.waiting.add(running)
        call(running.number, *arguments, lambda reply: self.events.put((running, reply)), **options)

    def handle(self, running: Running, event: Reply) -> None:
        self.waiting.remove(running)
        is_reset = not running.episode.turns
        self._resets -= is_reset
        calls, malformed = running.episode.calls + event.calls, running.episode.malformed + event.malformed
        running.update(calls=calls, malformed=malformed, score=event.score)
        if event.lost or (is_reset and event.done):
            self._lose(running, event.lost or (event.score.reason if event.score else "no score"))
        elif event.done:
            self.complete(running)
        else:
            # A turn that ends with a stop string lacks the stop token.
            after_stop = is_reset or int(running.rollout.token_ids[-1]) in self.sampling.stop_ids
            self._continue(running, self.owner.encode(event.messages, after_stop) if event.messages else [])

    def _continue(self, running: Running, ids: Sequence[int]) -> None:
        """Append the tokens of an observation, so that the engine samples the next turn."""
        rollout, sampled = running.rollout, running.episode.sampled
        if len(rollout.token_ids) + len(ids) < self.sampling.max_tokens:
            running.rollout = replace(
                rollout,
                token_ids=torch.cat((rollout.token_ids, torch.tensor(ids, dtype=torch.int64))),
                log_probs=torch.cat((rollout.log_probs, torch.zeros(len(ids)))),
                finish="cut",
                spans=extend_spans(rollout.spans, self.owner.engine.version, len(ids)),
            )
            running.update(sampled=torch.cat((sampled, torch.zeros(len(ids), dtype=torch.bool))))
            self.ready.append(running)
        elif len(sampled):
            self.pool.end(running.number)
            running.update(score=ScoreResult(0.0, "no_answer", "the observation leaves no room in rollout.max_tokens"))
            running.rollout = replace(running.rollout, finish="length")
            self.complete(running)
        else:
            self._lose(running, f"the first observation of {len(ids)} tokens leaves no room in rollout.max_tokens")

    def _lose(self, running: Running, reason: str) -> None:
        self.pool.end(running.number)
        self.lose(running, reason)
