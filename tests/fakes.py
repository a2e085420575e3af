"""Fakes of the parts of a step other than the model: prompts, tokenizer, reward pool, and an engine with faults."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import tiny
import torch
from torch import Tensor

from megatron_brorl.ops.philox import uniforms
from megatron_brorl.rewards.registry import judge
from megatron_brorl.rewards.worker_pool import PoolStats, ScoreRequest, completed, score_result
from megatron_brorl.rollout.engine import GenerateCallbacks, Request, Sampling, Supply
from megatron_brorl.types import Prompt, Rollout, ScoreResult

STOP = 2


def prompts(count: int, first: int = 0) -> list[Prompt]:
    """Return prompts of one to nine tokens."""
    batch = []
    for i in range(first, first + count):
        ids = torch.randint(3, tiny.VOCAB, (1 + (5 * i + 3) % 9,), generator=torch.Generator().manual_seed(i))
        batch.append(Prompt(f"p/{i}", text="", token_ids=tuple(ids.tolist()), answer=None, verifier="exact"))
    return batch


@dataclass
class Source:
    """A source with an endless sequence of prompts, or with one batch for every step."""

    batch: list[Prompt] | None = None

    def prompts(self, start: int, count: int) -> list[Prompt]:
        return self.batch or prompts(count, start)


class Tokenizer:
    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


class Pool:
    """Give the reward 1 to responses whose tokens have an even sum, and 0 to others. Scores are ready at once."""

    def judge(self, answer: str) -> float:
        return float(reward(answer))

    def submit(self, request: ScoreRequest) -> Future[ScoreResult]:
        answer = request.answer
        if answer is None:
            return completed(ScoreResult(0.0, "no_answer", request.no_answer_reason))
        value = self.judge(answer)
        parts = {"even": value, "words": 1 / (1 + len(answer.split()))}
        return completed(ScoreResult(value, "ok", f"judged {answer!r}", parts))

    def call(self, name: str, arguments: tuple) -> Future[ScoreResult]:
        return completed(score_result(judge(name)(*arguments)))

    def reset(self) -> None:
        pass

    def cancel(self) -> None:
        pass

    @property
    def stats(self) -> PoolStats:
        return PoolStats()


class Notes:
    """A progress display that keeps its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def update(self, step_done: int, metrics: dict[str, str], steps_left: float = 0.0) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)


def reward(text: str) -> bool:
    return sum(map(int, text.split())) % 2 == 0


def draws(key: int, siblings: Sequence[int], tokens: int, stop_below: float = 0.08) -> list[list[int]]:
    """Return the first tokens that the fake engine draws for each sibling.

    A token is the stop token with probability `stop_below`, and otherwise uniform over the tokens from 3 on.
    """
    index = torch.tensor(siblings).repeat_interleave(tokens)
    numbers = uniforms(torch.full_like(index, key), index, torch.arange(tokens).repeat(len(siblings)))
    other_tokens = 3 + ((numbers - stop_below) / (1 - stop_below) * (tiny.VOCAB - 3)).long()
    return torch.where(numbers < stop_below, STOP, other_tokens).view(-1, tokens).tolist()


def log_prob(token: int, version: int) -> float:
    """Return a log-probability that differs for each token and for each version of the weights."""
    return -math.log(tiny.VOCAB) - token / 1000 - version / 8


@dataclass
class Engine:
    """An engine whose tokens depend only on the keyed random numbers. Faults are set by (prompt id, sibling index)."""

    lose: set[tuple[str, int]] = field(default_factory=set)  # rollouts that are never delivered
    stall: set[tuple[str, int]] = field(default_factory=set)  # rollouts that keep the call busy
    nonfinite: dict[tuple[str, int], float] = field(default_factory=dict)  # last log-probs of these rollouts
    deaf: threading.Event | None = None  # A stalled call ends at this event, and with None when it is cancelled.
    room: int = 4  # rows that the engine requests from a supply at a time
    takes: int = 10**6  # how often, at most, a call asks its supply for requests
    version: int = -1
    calls: list[list[Request]] = field(default_factory=list)
    verbs: list[str] = field(default_factory=list)  # names of the methods that were called, in order
    duplicate_advice: str = "the fake engine"

    def kv_usage(self) -> None:
        return None

    def sleep(self) -> None:
        self.verbs.append("sleep")

    def wake(self) -> None:
        self.verbs.append("wake")

    def restart(self, why: str) -> bool:
        return False

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        for _ in tensors:
            pass
        self.verbs.append("update_weights")
        self.version = version

    def skip_update(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for _ in tensors:
            pass

    def barrier(self) -> None:
        self.verbs.append("barrier")

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        callbacks: GenerateCallbacks | None = None,
        supply: Supply | None = None,
    ) -> list[list[Rollout]]:
        assert callbacks is not None
        self.verbs.append("generate")
        self.calls.append(list(requests))
        groups = []
        stalled = False
        for number, request in enumerate(self._all(supply)):
            rollouts = []
            begun = {r.index: r for r in request.begun}
            siblings = range(request.first, request.first + request.n)
            tokens_of = dict(zip(siblings, draws(request.key, siblings, sampling.max_tokens), strict=True))
            for sibling in siblings:
                slot = (request.prompt.id, sibling)
                if slot in self.lose:
                    continue
                start = begun.get(sibling, Rollout(sibling, torch.zeros(0, dtype=torch.int64), torch.zeros(0), "cut"))
                stalled |= slot in self.stall
                rollout = start if slot in self.stall else self._go_on(start, tokens_of[sibling], sampling)
                if slot in self.nonfinite:
                    rollout.log_probs[-1] = self.nonfinite[slot]
                rollouts.append(rollout)
                if rollout.finish != "cut":
                    callbacks.finished(number, rollout)
            groups.append(rollouts)
        if stalled:
            (self.deaf or callbacks._cancelled).wait()
        return groups

    def _all(self, supply: Supply | None) -> Iterator[Request]:
        """Yield the requests of a call, then those of the supply, each time after the earlier rows have ended."""
        call = self.calls[-1]
        yield from list(call)
        for earlier_requests in range(self.takes if supply else 0):
            new = supply.next_requests(self.room)
            if not new and earlier_requests:  # The first answer may be empty, if this rank has no share of the call.
                return
            call.extend(new)
            yield from new

    def _go_on(self, start: Rollout, tokens: list[int], sampling: Sampling) -> Rollout:
        length_before = len(start.token_ids)
        new = tokens[length_before : length_before + sampling.new_tokens]
        finish = "length" if length_before + len(new) == sampling.max_tokens else "cut"
        ends = [i for i, token in enumerate(new) if token in sampling.stop_ids]
        if ends:
            new = new[: ends[0] + 1]
            finish = "stop"
        ids = torch.cat((start.token_ids, torch.tensor(new)))
        log_probs = torch.cat((start.log_probs, torch.tensor([log_prob(token, self.version) for token in new])))
        spans = (*start.spans, (self.version, len(new)))
        return replace(start, token_ids=ids, log_probs=log_probs, finish=finish, spans=spans)
