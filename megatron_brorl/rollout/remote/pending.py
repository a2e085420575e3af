"""Rollouts that a rank has requested from an engine process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import torch

from megatron_brorl.errors import shown
from megatron_brorl.ops.philox import stream_key
from megatron_brorl.rollout.engine import GenerateCallbacks, Request, Sampling, Supply, extend_spans, turn_start
from megatron_brorl.rollout.native.stopping import StopCriteria
from megatron_brorl.rollout.remote.protocol import Message
from megatron_brorl.types import FinishReason, Rollout


@dataclass(frozen=True)
class PendingRollout:
    """One requested rollout."""

    request: int  # index of its request
    ids: tuple[int, ...]  # tokens of the prompt and of `begun`
    begun: Rollout  # the rollout before this call
    max_new_tokens: int
    seed: int
    source: Request

    def completed(self, answer: Message, sampling: Sampling, version: int) -> Rollout:
        """Return the rollout extended by the tokens of the engine's answer.

        answer: tensors ids [new tokens] int64, log_probs [new tokens] float32 and, with Sampling.routes, the routes of
        all tokens but the last. version: version of the weights that generated them.
        """
        begun = self.begun
        ids = answer.tensors["ids"]
        if not len(ids):
            return begun

        # A rollout that reached tokens_per_call, but not max_tokens, continues in the next step.
        finish: FinishReason = answer.fields["finish"]
        if finish == "length" and sampling.tokens_per_call and len(begun.token_ids) + len(ids) < sampling.max_tokens:
            finish = "cut"

        log_probs = answer.tensors["log_probs"] if sampling.log_probs else torch.full((len(ids),), float("nan"))
        return Rollout(
            begun.index,
            token_ids=torch.cat((begun.token_ids, ids)),
            log_probs=torch.cat((begun.log_probs, log_probs)),
            finish=finish,
            spans=extend_spans(begun.spans, version, len(ids)),
            episode=begun.episode,
            routes=answer.tensors["routes"].view(answer.fields["routes"]) if sampling.routes else None,
        )

    def fault(self, answer: Message, sampling: Sampling, vocab: int) -> str:
        """Return why an answer is invalid, or "". vocab: vocabulary size of the model, including padding."""
        ids = answer.tensors["ids"]
        log_probs = answer.tensors["log_probs"]
        finish = answer.fields["finish"]
        if len(ids) > self.max_new_tokens:
            return f"{len(ids)} tokens where {self.max_new_tokens} were requested"
        outside = ids[(ids < 0) | (ids >= vocab)]
        if len(outside):
            return f"token {int(outside[0])} outside the vocabulary of {vocab}"
        if sampling.log_probs and (len(log_probs) != len(ids) or bool(log_probs.isnan().any())):
            return f"{len(log_probs)} log-probabilities for {len(ids)} tokens, or NaN among them"
        computed = len(self.ids) + len(ids) - 1
        routed = answer.fields.get("routes", [0])[0]  # number of tokens; the field is the shape of the routes
        if sampling.routes and len(ids) and routed != computed:
            return f"routes of {routed} tokens where {computed} were computed"
        return "" if finish in get_args(FinishReason) else f"unknown finish reason {shown(finish)}"


@dataclass
class PendingRollouts:
    """The rollouts of one call of generate, both pending and answered."""

    sampling: Sampling
    callbacks: GenerateCallbacks | None
    supply: Supply | None
    max_in_flight: int
    vocab: int  # size of the vocabulary, with padding
    decode: Callable[[Sequence[int]], str] | None = None  # see StopCriteria

    def __post_init__(self) -> None:
        self._stops = StopCriteria(self.sampling.stop_ids, self.sampling.stop_strings, self.decode)
        self.faults: list[str] = []  # reasons of invalid answers, whose rollouts are lost
        self.rows: dict[int, PendingRollout] = {}  # by the number in messages
        self._results: list[list[Rollout]] = []  # by request
        self._count = 0  # rollouts added so far
        self._withdrawn: set[int] = set()  # the numbers that withdrawn() has returned

    def add(self, requests: Sequence[Request]) -> dict[int, PendingRollout]:
        """Add requests and return their rollouts by number. They are numbered after all earlier rollouts."""
        added = {}
        for index, request in enumerate(requests, start=len(self._results)):
            limit = min(self.sampling.new_tokens, request.max_tokens or self.sampling.max_tokens)
            for begun in request.rollouts():
                begun_tokens = len(begun.token_ids)
                ids = (*request.prompt.token_ids, *begun.token_ids.tolist())
                tokens = min(limit, self.sampling.max_tokens - begun_tokens)
                seed = sibling_seed(request.key, begun.index, begun_tokens)
                added[self._count] = PendingRollout(index, ids, begun, max_new_tokens=tokens, seed=seed, source=request)
                self._count += 1
        self.rows.update(added)
        self._results.extend([] for _ in requests)
        return added

    def admit(self) -> dict[int, PendingRollout]:
        """Add as many rollouts from the supply as the engine has room for, and return them by number."""
        room = self.max_in_flight - len(self.rows)
        return self.add(self.supply.next_requests(room)) if self.supply and room > 0 else {}

    def withdrawn(self) -> list[int]:
        """Return the numbers of the rollouts whose requests have been withdrawn, each once."""
        withdrawn = [n for n, row in self.rows.items() if row.source.withdrawn and row.source.withdrawn.is_set()]
        new = [n for n in withdrawn if n not in self._withdrawn]
        self._withdrawn.update(new)
        return new

    def answered(self, answer: Message, version: int) -> None:
        """Record the answer for a rollout. version: version of the weights.

        Responses are cut at stop strings by the built-in engine's rule. An engine may find a stop string later, because
        it delays incomplete characters and does not see the earlier text of a continued rollout.
        """
        row = self.rows.pop(answer.fields["number"])
        fault = row.fault(answer, self.sampling, self.vocab)
        rollout = row.begun if fault else row.completed(answer, self.sampling, version)
        stops = self._stops.with_strings(row.source.stop_strings)
        if stops.strings and not fault:
            start = turn_start(row.begun)
            end = stops.first_end(rollout.token_ids[start:], begun=len(row.begun.token_ids) - start)
            if end is not None:
                end += start
                dropped = len(rollout.token_ids) - end
                routes = rollout.routes
                rollout = replace(
                    rollout,
                    token_ids=rollout.token_ids[:end],
                    log_probs=rollout.log_probs[:end],
                    finish="stop",
                    spans=extend_spans(row.begun.spans, version, end - len(row.begun.token_ids)),
                    routes=None if routes is None else routes[: len(routes) - dropped],
                )
            elif rollout.finish == "stop":
                fault = "it ended at a stop string, but its text contains none"
                rollout = row.begun
        if fault:
            self.faults.append(fault)
        self._deliver(row, rollout)

    def result(self) -> list[list[Rollout]]:
        """Return the rollouts of each request, by index. A rollout without an answer is as it was before the call."""
        for row in self.rows.values():
            self._deliver(row, row.begun)
        return [sorted(rollouts, key=lambda rollout: rollout.index) for rollouts in self._results]

    def _deliver(self, row: PendingRollout, rollout: Rollout) -> None:
        self._results[row.request].append(rollout)
        # A "cut" rollout is not finished, because it continues in a later call.
        if self.callbacks and rollout.finish != "cut":
            self.callbacks.finished(row.request, rollout)


def sibling_seed(key: int, sibling: int, done: int) -> int:
    """Return the 63-bit seed with which a sibling continues after `done` tokens. key: Request.key.

    The seeds of a prompt's siblings differ in their lower 32 bits, because PyTorch's CPU generator uses only those.
    """
    return stream_key("engine", key, done) ^ sibling


def generate_message(rows: Mapping[int, PendingRollout], sampling: Sampling, fields: Mapping[str, Any]) -> Message:
    """Return the message that requests `rows` (number -> rollout). fields: call number and version of the weights."""
    # Flat tensors, because every field of a message costs time.
    tensors = {
        "numbers": torch.tensor(list(rows)),
        "lengths": torch.tensor([len(row.ids) for row in rows.values()]),
        "ids": torch.tensor([i for row in rows.values() for i in row.ids], dtype=torch.int64),
        "tokens": torch.tensor([row.max_new_tokens for row in rows.values()]),
        "seeds": torch.tensor([row.seed for row in rows.values()]),
    }
    stops = {number: row.source.stop_strings for number, row in rows.items() if row.source.stop_strings}
    return Message("generate", {**fields, "sampling": asdict(sampling), "stops": list(stops.items())}, tensors)
