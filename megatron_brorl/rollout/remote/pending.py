"""Rollouts that an engine process was asked for and has not answered yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import torch

from megatron_brorl.errors import shown
from megatron_brorl.ops.philox import stream_key
from megatron_brorl.rollout.engine import GenerateCallbacks, Request, Sampling, Supply, extend_spans
from megatron_brorl.rollout.native.stopping import StopCriteria
from megatron_brorl.rollout.remote.protocol import Message
from megatron_brorl.types import FinishReason, Rollout


@dataclass(frozen=True)
class PendingRollout:
    """One rollout."""

    request: int  # place of its request
    ids: tuple[int, ...]  # of the prompt and what was sampled before
    begun: Rollout  # what was sampled before
    tokens: int  # to be added at most
    seed: int

    def completed(self, answer: Message, sampling: Sampling, version: int) -> Rollout:
        """Return the rollout extended by the tokens of the engine's answer.

        answer: tensors ids [tokens added] int64 and log_probs [tokens added] float32. version: the version of the
        weights that generated these tokens.
        """
        before = self.begun
        ids = answer.tensors["ids"]
        if not len(ids):
            return before

        # A rollout that reached only the token budget of this call is unfinished and continues in the next step.
        finish: FinishReason = answer.fields["finish"]
        if finish == "length" and len(before.token_ids) + len(ids) < sampling.max_tokens:
            finish = "cut"

        log_probs = answer.tensors["log_probs"] if sampling.log_probs else torch.full((len(ids),), float("nan"))
        return Rollout(
            before.index,
            torch.cat((before.token_ids, ids)),
            torch.cat((before.log_probs, log_probs)),
            finish,
            extend_spans(before.spans, version, len(ids)),
        )

    def fault(self, answer: Message, sampling: Sampling, vocab: int) -> str:
        """Return why an answer cannot be part of a rollout, or "". vocab: of the model, with its padding."""
        ids = answer.tensors["ids"]
        log_probs = answer.tensors["log_probs"]
        finish = answer.fields["finish"]
        if len(ids) > self.tokens:
            return f"{len(ids)} tokens where {self.tokens} were asked for"
        outside = ids[(ids < 0) | (ids >= vocab)]
        if len(outside):
            return f"token {int(outside[0])} of a vocabulary of {vocab}"
        if sampling.log_probs and (len(log_probs) != len(ids) or bool(log_probs.isnan().any())):
            return f"{len(log_probs)} log-probabilities for {len(ids)} tokens, or one that is not a number"
        return "" if finish in get_args(FinishReason) else f"the end {shown(finish)}"


class PendingRollouts:
    """The rollouts of one call of generate, both pending and answered."""

    def __init__(
        self,
        sampling: Sampling,
        callbacks: GenerateCallbacks | None,
        supply: Supply | None,
        most: int,
        vocab: int,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """most: rollouts the engine has at a time. vocab: of the model, with padding. decode: see StopCriteria."""
        self._stops = StopCriteria(sampling.stop_ids, sampling.stop_strings, decode) if sampling.stop_strings else None
        self._sampling = sampling
        self._callbacks = callbacks
        self._supply = supply
        self._most = most
        self._vocab = vocab
        self.faults: list[str] = []  # of invalid answers, each of which costs its rollout
        self.rows: dict[int, PendingRollout] = {}  # by the number in the engine's answers
        self._found: list[list[Rollout]] = []  # of each request
        self._numbered = 0

    def add(self, requests: Sequence[Request]) -> dict[int, PendingRollout]:
        """Add requests, numbered on from those before; returns their rollouts."""
        new = (
            self._pending(number, request, begun)
            for number, request in enumerate(requests, start=len(self._found))
            for begun in request.rollouts()
        )
        added = dict(enumerate(new, start=self._numbered))
        self.rows.update(added)
        self._found.extend([] for _ in requests)
        self._numbered += len(added)
        return added

    def _pending(self, number: int, request: Request, begun: Rollout) -> PendingRollout:
        done = len(begun.token_ids)
        sampling = self._sampling
        tokens = min(sampling.budget or sampling.max_tokens, sampling.max_tokens - done)
        ids = (*request.prompt.token_ids, *begun.token_ids.tolist())
        return PendingRollout(number, ids, begun, tokens, sibling_seed(request.key, begun.index, done))

    def admit(self) -> dict[int, PendingRollout]:
        """Take rollouts of the supply, as many as the engine has room for."""
        room = self._most - len(self.rows)
        return self.add(self._supply.next_requests(room)) if self._supply and room > 0 else {}

    def answered(self, answer: Message, version: int) -> None:
        """Record the answer for a rollout; version: of the weights.

        Responses end by the built-in engine's rule for stop strings. An engine may find a string later, because it
        holds back the text of unfinished characters and does not see the text that a continued rollout had before.
        """
        row = self.rows.pop(answer.fields["number"])
        fault = row.fault(answer, self._sampling, self._vocab)
        rollout = row.begun if fault else row.completed(answer, self._sampling, version)
        if self._stops and not fault:
            end = self._stops.first_end(rollout.token_ids, len(row.begun.token_ids))
            if end is not None:
                rollout = replace(
                    rollout,
                    token_ids=rollout.token_ids[:end],
                    log_probs=rollout.log_probs[:end],
                    finish="stop",
                    spans=extend_spans(row.begun.spans, version, end - len(row.begun.token_ids)),
                )
            elif rollout.finish == "stop":
                fault = "it ended at a stop string that the text of its tokens does not contain"
                rollout = row.begun
        if fault:
            self.faults.append(fault)
        self._deliver(row, rollout)

    def result(self) -> list[list[Rollout]]:
        """Return the rollouts of each request, by index; those without an answer are as they were before this call."""
        for row in self.rows.values():
            self._deliver(row, row.begun)
        return [sorted(rollouts, key=lambda x: x.index) for rollouts in self._found]

    def _deliver(self, row: PendingRollout, rollout: Rollout) -> None:
        self._found[row.request].append(rollout)
        # A "cut" rollout is not reported as finished, because it continues in a later call.
        if self._callbacks and rollout.finish != "cut":
            self._callbacks.finished(row.request, rollout)


def sibling_seed(key: int, sibling: int, done: int) -> int:
    """Return the seed for the tokens of a sibling after its first `done`; key: of the request.

    The siblings of a prompt differ in the lower half, because PyTorch's CPU generator reads only that half.
    """
    return stream_key("engine", key, done) ^ sibling


def generate_message(rows: Mapping[int, PendingRollout], sampling: Sampling, fields: Mapping[str, Any]) -> Message:
    """Return the message that asks for all of `rows` (number -> rollout). fields: of the call."""
    # Flat tensors, because a message costs time per field.
    tensors = {
        "numbers": torch.tensor(list(rows)),
        "lengths": torch.tensor([len(row.ids) for row in rows.values()]),
        "ids": torch.tensor([i for row in rows.values() for i in row.ids], dtype=torch.int64),
        "tokens": torch.tensor([row.tokens for row in rows.values()]),
        "seeds": torch.tensor([row.seed for row in rows.values()]),
    }
    return Message("generate", {**fields, "sampling": asdict(sampling)}, tensors)
