"""Rollouts of agents: functions that call the policy through an OpenAI-compatible endpoint.

A worker process runs the function. Each of its calls becomes a request to the engine, which decodes the calls of many
rollouts together. When the function returns, the rollout is complete: its sequences (sequences.py) one after the
other, with the function's score or the text that a verifier scores. Random numbers are keyed by the tokens of a call,
so that they do not depend on the order in which calls arrive.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from megatron_brorl.ops.philox import stream_key
from megatron_brorl.rollout.agents.sequences import Call, Chat, Sequences, tokens
from megatron_brorl.rollout.agents.server import MODEL, AgentServer, Endpoint
from megatron_brorl.rollout.engine import GenerateCallbacks, Request, Sampling, Supply
from megatron_brorl.rollout.turns import Interaction, ProcessEngine, Running
from megatron_brorl.types import Episode, FinishReason, Prompt, Rollout

if TYPE_CHECKING:
    from megatron_brorl.environments.pool import Reply

GRACE_S = 10.0  # seconds after agent.max_seconds until the process of a function that is not async is killed


@dataclass
class AgentEngine(ProcessEngine):
    """An engine whose rollouts are runs of an agent. Their Episode has the starts of their sequences.

    A rollout whose process is lost or whose agent made no call is returned as "cut". Unfinished rollouts are omitted.
    """

    chat: Chat
    server: AgentServer = field(default_factory=AgentServer)

    def interaction(self, requests: Sequence[Request], sampling: Sampling, *others: Any) -> Interaction[Any] | None:
        """See ProcessEngine. Only the sampling of agents shares no prefixes."""
        return None if sampling.shares_prefixes else _Agents(self, requests, sampling, *others)

    def close(self) -> None:
        """End the processes of agents and the endpoint."""
        self.pool.close()
        self.server.close()


@dataclass
class FixedText:
    """An engine that gives the same tokens to every call, for the trial of an agent."""

    ids: list[int]  # with a stop token

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, callbacks: GenerateCallbacks, supply: Supply
    ) -> list[list[Rollout]]:
        request_numbers = count()
        while supply.has_more():
            for request in supply.next_requests(room=8):
                ids = torch.tensor(self.ids[: request.max_tokens])
                finish: FinishReason = "stop" if len(ids) == len(self.ids) else "length"
                rollout = Rollout(0, ids, torch.zeros(len(ids)), finish, spans=((0, len(ids)),))
                callbacks.finished(next(request_numbers), rollout)
        return []


@dataclass(eq=False)
class _Agent(Running):
    key: str  # API key
    endpoint: Endpoint
    withdrawn: threading.Event = field(default_factory=threading.Event)
    calls: list[Call] = field(default_factory=list)  # the calls that have arrived


class _Agents(Interaction[_Agent]):
    """The agents of one call of generate."""

    def __init__(self, owner: AgentEngine, *arguments: Any) -> None:
        super().__init__(owner.pool, owner.chat.config.function, *arguments)
        self.owner = owner
        self.prompt_tokens = owner.chat.prompt_tokens
        self._sent: list[Call] = []  # by index of the engine's request

    def next_requests(self, room: int) -> list[Request]:
        self.receive()
        ready = [self.ready.popleft() for _ in range(min(room, len(self.ready)))]
        # Agents that have not called yet will need room.
        self.begin(room - len(ready) - sum(not agent.calls for agent in self.waiting))
        self._sent += [call for _, call in ready]
        requests = []
        for agent, call in ready:
            row_id = self.requests[agent.request].prompt.id
            prompt = Prompt(row_id, text="", token_ids=tuple(call.prompt_ids), answer=None, verifier="none")
            limits = {"max_tokens": call.limit, "stop_strings": call.stop, "withdrawn": agent.withdrawn}
            requests.append(Request(prompt, call.key, n=1, **limits))
        return requests

    def start(self, request: int, rollout: Rollout, number: int) -> _Agent:
        prompt_request = self.requests[request]
        server = self.owner.server
        chat = self.owner.chat

        def put(event: Call | Reply) -> None:
            self.events.put((agent, event))

        sequences = Sequences(chat, stream_key(prompt_request.key, rollout.index))
        endpoint = Endpoint(sequences, self.sampling, put)
        agent = _Agent(request, rollout, number, secrets.token_hex(16), endpoint)
        server.endpoints[agent.key] = endpoint
        connection = server.url, agent.key, MODEL
        self.pool.run(number, prompt_request.prompt.row(), *connection, chat.config.max_seconds, reply=put)
        return agent

    def finished(self, request: int, rollout: Rollout) -> None:
        """Pass a completion to the endpoint."""
        call = self._sent[request]
        call.ids, call.log_probs, call.finish = rollout.token_ids, rollout.log_probs, rollout.finish
        call.stopped = int(rollout.token_ids[-1]) in self.sampling.stop_ids
        call.version = rollout.spans[-1][0]
        call.done()

    def end(self, running: _Agent) -> None:
        self._expire(running)
        self.rollouts.remove(running)

    def handle(self, running: _Agent, event: Call | Reply) -> None:
        if isinstance(event, Call):
            running.calls.append(event)
            self.ready.append((running, event))
            return
        self._expire(running)
        sequences = running.endpoint.sequences
        rows = sequences.rows()
        if event.lost or not rows:
            why = event.score.reason if event.score and event.score.reason else "it returned"
            self.lose(running, event.lost or f"the agent made no call: {why}")
            return
        ids, log_probs, sampled, starts, spans = tokens(rows)
        calls = [call for row in rows for call in row]
        text = None
        if event.score is None:  # The verifier scores the returned text, or the last reply of the first conversation.
            first_row = next((row for row in rows if sequences.calls[0] in row), rows[0])
            text = event.messages[0]["content"] if event.messages else str(first_row[-1].reply["content"])
        tool_calls = sum(len(call.reply.get("tool_calls", ())) for call in calls)
        episode = Episode(sampled, len(calls), tool_calls, score=event.score, starts=starts, text=text)
        running.rollout = Rollout(running.rollout.index, ids, log_probs, "stop", spans, episode)
        self.complete(running)

    def _expire(self, agent: _Agent) -> None:
        """Let the key of a rollout expire, and withdraw its unanswered calls."""
        self.waiting.discard(agent)
        self.owner.server.endpoints.pop(agent.key, None)
        agent.withdrawn.set()
        self.ready = deque(pair for pair in self.ready if pair[0] is not agent)
        for call in agent.calls:
            if call.finish == "cut":
                call.done()
