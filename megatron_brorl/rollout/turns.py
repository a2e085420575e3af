"""Rollouts of several turns: between two turns of the model, its environment answers.

A turn of every rollout is one request to the engine. When it ends, a process of the environment pool runs its tool
calls. Then the rollout continues from its tokens and those of the observation, as a further request of the engine's
supply. The engine decodes other rollouts meanwhile, so no rollout waits for the turn of another one. Random numbers are
keyed by the position of a token in its rollout, so tokens depend neither on the batch nor on the time of a reply.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from megatron_brorl.config.schema import EnvironmentConfig
from megatron_brorl.rewards.registry import ENVIRONMENT
from megatron_brorl.rollout.engine import GenerateCallbacks, Request, RolloutEngine, Sampling, Supply, extend_spans
from megatron_brorl.types import Episode, FinishReason, Rollout, ScoreResult

if TYPE_CHECKING:
    from megatron_brorl.environments.pool import EnvironmentPool, Reply

_POLL_S = 0.05  # longest wait for a reply before the caller is asked again whether the call is cancelled
_TAG_TOKENS = 16  # most tokens of <think> and the white space after it
_NUMBERS = count()  # of the episodes of this process


@dataclass
class TurnEngine:
    """A RolloutEngine whose rollouts are episodes of an environment. Methods other than generate are the engine's."""

    engine: RolloutEngine
    pool: EnvironmentPool
    config: EnvironmentConfig
    decode: Callable[[Sequence[int]], str]  # the tokens of a turn without its stop token -> text
    # The messages that answer a turn, and whether it has a stop token -> the tokens that follow it
    encode: Callable[[Sequence[dict[str, str]], bool], list[int]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        callbacks: GenerateCallbacks | None = None,
        supply: Supply | None = None,
    ) -> list[list[Rollout]]:
        """See RolloutEngine. Rollouts have an Episode, and their max_tokens include the tokens of observations.

        A rollout whose environment is lost is returned as "cut" with the reason in its score. Prompts of another
        verifier than "environment" are sampled in a single turn.
        """
        # Weight sync compares log-probabilities on random prompts, which no environment knows.
        if requests and requests[0].prompt.verifier != ENVIRONMENT:
            return self.engine.generate(requests, sampling, callbacks, supply)
        call = _Call(self, requests, sampling, callbacks, supply)
        try:
            self.engine.generate([], replace(sampling, turn_tokens=sampling.max_tokens), call, call)
        finally:
            call.close()
        return call.results()


@dataclass(eq=False)
class _Running:
    """An episode of a call."""

    request: int  # index among the caller's requests
    number: int  # of the episode in the pool
    rollout: Rollout  # Its finish is that of its last turn.

    @property
    def episode(self) -> Episode:
        assert self.rollout.episode is not None
        return self.rollout.episode

    def update(self, **changes: Any) -> None:
        """Replace fields of the episode."""
        self.rollout = replace(self.rollout, episode=replace(self.episode, **changes))

    def end(self, score: ScoreResult, finish: FinishReason) -> None:
        self.update(score=score)
        self.rollout = replace(self.rollout, finish=finish)


class _Call:
    """One call of generate: the callbacks and the supply of the engine, which samples the turns.

    Only the generating thread uses it. Threads of the pool put their replies into a queue.
    """

    def __init__(
        self,
        owner: TurnEngine,
        requests: Sequence[Request],
        sampling: Sampling,
        callbacks: GenerateCallbacks | None,
        supply: Supply | None,
    ) -> None:
        self.owner = owner
        self.sampling = sampling
        self.callbacks = callbacks
        self.supply = supply
        self.requests = list(requests)
        self.rows = sum(r.n for r in requests) + (supply.rows if supply else 0)
        self.prompt_tokens = max([supply.prompt_tokens if supply else 0, *(len(r.prompt.token_ids) for r in requests)])

        self._not_begun = deque((i, rollout) for i, r in enumerate(requests) for rollout in r.rollouts())
        self._episodes: list[_Running] = []
        self._turns: list[_Running] = []  # by index of the engine's request
        self._waiting: set[_Running] = set()  # for a reply
        self._ready: deque[_Running] = deque()  # for the engine
        self._resets = 0  # episodes among the waiting ones whose first turn has not begun
        self._replies: SimpleQueue[tuple[_Running, Reply]] = SimpleQueue()
        self._lost: list[str] = []  # reasons

    def next_requests(self, room: int) -> list[Request]:
        self._receive()
        # Rollouts that continue come first, so that few environments exist at a time.
        taken = [self._ready.popleft() for _ in range(min(room, len(self._ready)))]
        self._begin(room - len(taken) - self._resets)
        self._turns += taken
        turns = []
        for running in taken:
            request, begun = self.requests[running.request], running.rollout
            # Without tokens it is not a continued rollout, so that siblings start from the same state of their prompt.
            rest = (begun,) if len(begun.token_ids) else ()
            turns.append(Request(request.prompt, request.key, 1, begun.index, rest))
        return turns

    def has_more(self) -> bool:
        if self._waiting and not self._ready:
            self._receive(_POLL_S)
        return bool(self._waiting or self._ready or self._not_begun or (self.supply and self.supply.has_more()))

    def cancelled(self) -> bool:
        self._receive()
        return self.callbacks is not None and self.callbacks.cancelled()

    def finished(self, request: int, rollout: Rollout) -> None:
        """Send the text of a turn to its environment."""
        running = self._turns[request]
        before = running.episode
        begin = len(before.sampled)
        new = torch.ones(len(rollout.token_ids) - begin, dtype=torch.bool)
        running.rollout = replace(rollout, episode=before)
        running.update(sampled=torch.cat((before.sampled, new)), turns=before.turns + 1)
        ids = rollout.token_ids[begin:].tolist()
        if ids[-1] in self.sampling.stop_ids:
            ids.pop()
        last = rollout.finish == "length" or running.episode.turns == self.owner.config.max_turns
        prompt = self.requests[running.request].prompt.token_ids[-_TAG_TOKENS:]
        context = [*prompt, *rollout.token_ids[:begin].tolist()][-_TAG_TOKENS:]
        in_thought = self.owner.decode(context).rstrip().endswith("<think>")
        self._ask(running, self.owner.pool.step, self.owner.decode(ids), last, in_thought=in_thought)

    def close(self) -> None:
        """End the episodes whose rollouts are unfinished, and print a line about lost environments."""
        for running in self._episodes:
            if running.episode.score is None:
                self.owner.pool.end(running.number)
        if self._lost:
            text = f"{self.owner.config.factory}: {len(self._lost)} rollouts are lost, for example: {self._lost[0]}"
            print(f"warning: {text}", file=sys.stderr, flush=True)

    def results(self) -> list[list[Rollout]]:
        """Return the rollouts of each request of the caller, by index, without those that were not begun."""
        found: list[list[Rollout]] = [[] for _ in self.requests]
        for running in self._episodes:
            done = running.episode.score is not None
            found[running.request].append(running.rollout if done else replace(running.rollout, finish="cut"))
        return [sorted(rollouts, key=lambda r: r.index) for rollouts in found]

    def _begin(self, most: int) -> None:
        """Reset the environments of at most `most` further rollouts."""
        if most > 0 and not self._not_begun and self.supply is not None:
            for request in self.supply.next_requests(most):
                self._not_begun.extend((len(self.requests), rollout) for rollout in request.rollouts())
                self.requests.append(request)
        for _ in range(min(most, len(self._not_begun))):
            i, rollout = self._not_begun.popleft()
            nothing = Episode(torch.empty(0, dtype=torch.bool), turns=0)
            running = _Running(i, next(_NUMBERS), replace(rollout, episode=nothing))
            self._episodes.append(running)
            self._resets += 1
            self._ask(running, self.owner.pool.reset, self.requests[i].prompt.row())

    def _ask(self, running: _Running, call: Callable[..., None], *arguments: Any, **options: Any) -> None:
        self._waiting.add(running)
        call(running.number, *arguments, lambda reply: self._replies.put((running, reply)), **options)

    def _receive(self, seconds: float = 0.0) -> None:
        """Handle the replies that have arrived. Wait at most `seconds` for the first one."""
        with suppress(Empty):
            item = self._replies.get(bool(seconds), seconds)
            while True:
                self._handle(*item)
                item = self._replies.get_nowait()

    def _handle(self, running: _Running, reply: Reply) -> None:
        self._waiting.remove(running)
        begins = not running.episode.turns
        self._resets -= begins
        calls, malformed = running.episode.calls + reply.calls, running.episode.malformed + reply.malformed
        running.update(calls=calls, malformed=malformed, score=reply.score)
        if reply.lost or (begins and reply.done):
            self._lose(running, reply.lost or (reply.score.reason if reply.score else "no score"))
        elif reply.done:
            self._deliver(running)
        else:
            # A turn that ends with a stop string lacks the stop token.
            after_stop = begins or int(running.rollout.token_ids[-1]) in self.sampling.stop_ids
            self._continue(running, self.owner.encode(reply.messages, after_stop) if reply.messages else [])

    def _continue(self, running: _Running, ids: Sequence[int]) -> None:
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
            self._ready.append(running)
        elif len(sampled):
            self.owner.pool.end(running.number)
            running.end(ScoreResult(0.0, "no_answer", "the observation leaves no room in rollout.max_tokens"), "length")
            self._deliver(running)
        else:
            self._lose(running, f"the first observation of {len(ids)} tokens leaves no room in rollout.max_tokens")

    def _deliver(self, running: _Running) -> None:
        if self.callbacks is not None:
            self.callbacks.finished(running.request, running.rollout)

    def _lose(self, running: _Running, reason: str) -> None:
        self._lost.append(reason)
        self.owner.pool.end(running.number)
        running.end(ScoreResult(0.0, "crash", reason), "cut")
