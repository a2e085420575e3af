"""Rollouts of several turns: between two turns of the model, its environment answers.

When a turn ends, a process of the environment pool runs its tool calls. Then the rollout continues from its tokens and
those of the observation. Random numbers are keyed by the position of a token in its rollout, so tokens depend neither
on the batch nor on the time of a reply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from megatron_brorl.config.schema import EnvironmentConfig
from megatron_brorl.rewards.registry import ENVIRONMENT
from megatron_brorl.rollout.engine import GenerateCallbacks, Request, RolloutEngine, Sampling, Supply, extend_spans
from megatron_brorl.rollout.interaction import Interaction, Running, in_thought
from megatron_brorl.types import Rollout, ScoreResult

if TYPE_CHECKING:
    from megatron_brorl.environments.pool import EnvironmentPool, Reply


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
        episodes = _Episodes(self, requests, sampling, callbacks, supply)
        return episodes.generate(self.engine, sampling.max_tokens, self.config.factory)


class _Episodes(Interaction[Running]):
    """The episodes of one call of generate. The finish of an incomplete rollout is that of its last turn."""

    def __init__(self, owner: TurnEngine, *call: Any) -> None:
        super().__init__(owner.pool, *call)
        self.owner = owner
        self._turns: list[Running] = []  # by index of the engine's request
        self._resets = 0  # episodes among the waiting ones whose first turn has not begun

    def next_requests(self, room: int) -> list[Request]:
        self.receive()
        # Rollouts that continue come first, so that few environments exist at a time.
        ready = [self.ready.popleft() for _ in range(min(room, len(self.ready)))]
        self.begin(room - len(ready) - self._resets)
        self._turns += ready
        turns = []
        for running in ready:
            request, begun = self.requests[running.request], running.rollout
            # Without tokens it is not a continued rollout, so that siblings start from the same state of their prompt.
            rest = (begun,) if len(begun.token_ids) else ()
            turns.append(Request(request.prompt, request.key, 1, begun.index, rest))
        return turns

    def start(self, request: int, rollout: Rollout, number: int) -> Running:
        running = Running(request, rollout, number)
        self._resets += 1
        self._ask(running, self.pool.reset, self.requests[request].prompt.row())
        return running

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
        begins = not running.episode.turns
        self._resets -= begins
        calls, malformed = running.episode.calls + event.calls, running.episode.malformed + event.malformed
        running.update(calls=calls, malformed=malformed, score=event.score)
        if event.lost or (begins and event.done):
            self._lose(running, event.lost or (event.score.reason if event.score else "no score"))
        elif event.done:
            self.complete(running)
        else:
            # A turn that ends with a stop string lacks the stop token.
            after_stop = begins or int(running.rollout.token_ids[-1]) in self.sampling.stop_ids
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
