"""Rollouts that an engine process is asked for and has not answered yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_brorl.ops.philox import stream_key
from megatron_brorl.rollout.continuation import extended, siblings
from megatron_brorl.rollout.engine import Request, Sampling
from megatron_brorl.rollout.remote.messages import Message
from megatron_brorl.types import FinishReason, Rollout


@dataclass(frozen=True)
class PendingRollout:
    """One of them."""

    request: int  # place of its request
    ids: tuple[int, ...]  # of the prompt and what was sampled before
    begun: Rollout  # what was sampled before
    tokens: int  # to be added at most
    seed: int

    def completed(self, answer: Message, sampling: Sampling, version: int) -> Rollout:
        """The rollout with what the engine's answer adds to it.

        answer: tensors ids [tokens added] int64 and log_probs [tokens added] float32. version: of the weights.
        """
        before, ids = self.begun, answer.tensors["ids"]
        if not len(ids):
            return before

        # A limit that this call set is no end: the rollout goes on in the next step.
        finish: FinishReason = answer.fields["finish"]
        if finish == "length" and len(before.token_ids) + len(ids) < sampling.max_tokens:
            finish = "cut"

        log_probs = answer.tensors["log_probs"] if sampling.log_probs else torch.full((len(ids),), float("nan"))
        return Rollout(
            before.index,
            torch.cat((before.token_ids, ids)),
            torch.cat((before.log_probs, log_probs)),
            finish,
            extended(before.spans, version, len(ids)),
        )


def pending_rollouts(requests: Sequence[Request], sampling: Sampling) -> Iterator[PendingRollout]:
    """Every sibling of every request, each with a seed of its own."""
    for number, request in enumerate(requests):
        for before in siblings(request):
            done = len(before.token_ids)
            tokens = min(sampling.budget or sampling.max_tokens, sampling.max_tokens - done)
            ids = (*request.prompt.token_ids, *before.token_ids.tolist())
            yield PendingRollout(number, ids, before, tokens, stream_key("engine", request.key, before.index, done))


def generate_message(rows: Mapping[int, PendingRollout], sampling: Sampling, fields: Mapping[str, Any]) -> Message:
    """Ask for all of `rows` (number -> rollout). fields: what tells this call from others."""
    settings = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "log_probs": sampling.log_probs,
    }

    # Flat tensors: a message costs per field, not per rollout.
    tensors = {
        "numbers": torch.tensor(list(rows)),
        "lengths": torch.tensor([len(row.ids) for row in rows.values()]),
        "ids": torch.tensor([i for row in rows.values() for i in row.ids], dtype=torch.int64),
        "tokens": torch.tensor([row.tokens for row in rows.values()]),
        "seeds": torch.tensor([row.seed for row in rows.values()]),
    }
    return Message("generate", {**fields, **settings}, tensors)
