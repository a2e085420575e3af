"""The interface of a rollout engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, get_args

import torch
from torch import Tensor

from megatron_brorl.errors import UserError
from megatron_brorl.types import FinishReason, Prompt, Rollout, ScoredRollout, ScoreResult

# (logits [B, V], keys, index, position [B], temperature, top_p, top_k) -> ids and log-probs [B]: sample_tokens of
# ops.reference.sampling or ops.fused.decode.
SampleTokens = Callable[[Tensor, Tensor, Tensor, Tensor, float, float, int], tuple[Tensor, Tensor]]
Spans = tuple[tuple[int, int], ...]  # (version of the weights, tokens drawn with it), in order
_FINISH: tuple[FinishReason, ...] = get_args(FinishReason)


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. temperature = 0 is greedy."""

    temperature: float
    top_p: float
    top_k: int  # 0 = off
    max_tokens: int  # of a response
    stop_ids: tuple[int, ...]  # a response ends with the first of these, which is part of it
    stop_strings: tuple[str, ...] = ()  # a response ends with the token that completes one of these in its text
    budget: int = 0  # tokens that one call adds to a response at most; what needs more comes back "cut". 0 = no limit
    log_probs: bool = True  # False: they are not needed, and may be nan


@dataclass(frozen=True)
class KvUsage:
    """How much of an engine's cache held keys and values in a call of generate, as shares of all of it."""

    peak: float
    mean: float  # over decoding steps
    turns: int  # decoding steps
    prompt_tokens: int  # of every row that came in
    prompt_found: int  # of these, computed for another row and still there


@dataclass(frozen=True)
class Request:
    """n siblings of one prompt, numbered first .. first + n - 1 within the prompt's random stream."""

    prompt: Prompt
    key: int  # of ops.philox.stream_key: the random numbers are a function of (key, sibling, position)
    n: int
    first: int = 0
    begun: tuple[Rollout, ...] = ()  # siblings among them that were "cut" before, and go on from their tokens

    def rollouts(self) -> Iterator[Rollout]:
        """Yield every sibling as it starts: without tokens, or "cut" where it began before."""
        nothing = torch.empty(0, dtype=torch.int64), torch.empty(0)
        begun = {r.index: r for r in self.begun}
        for sibling in range(self.first, self.first + self.n):
            yield begun.get(sibling) or Rollout(sibling, *nothing, "cut")


class GenerateCallbacks(Protocol):
    """Follows one call of generate; called from the thread that generates, so both must be quick and thread-safe."""

    def finished(self, request: int, rollout: Rollout) -> None:
        """Take a rollout of requests[request] that has ended, which may be long before generate returns."""

    def cancelled(self) -> bool:
        """Return whether generate must end soon, with unfinished rollouts "cut". Asked at least once per token."""


class Supply(Protocol):
    """Requests that wait for any rank's engine in a call of generate.

    Called from the thread that generates, between two tokens.
    """

    rows: int  # the most that may come of it
    prompt_tokens: int  # of the longest prompt that may come

    def next_requests(self, room: int) -> list[Request]:
        """Return the requests that the caller samples next, at most `room` rows; an empty list if none are ready.

        The caller calls it once before the first token and whenever it has room. The engines of other ranks sample the
        remaining requests.
        """

    def has_more(self) -> bool:
        """For a caller that has no row: return True when it should `take` again, False where nothing will come."""


class RolloutEngine(Protocol):
    """Holds one full copy of the policy for generation."""

    version: int  # of the weights it holds; -1 before the first update

    @property
    def duplicate_advice(self) -> str:
        """Name the engine, and what to do where it draws several rollouts by the same random numbers."""

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take full tensors [any shape] by Hugging Face name, or nothing at all.

        Raises weight_receiver.UpdateRefused, and keeps the version it has, where one is missing, unknown, of the wrong
        shape or not what its checksum says (ops.checksum.ChecksummedTensor), or where the stream breaks off.
        """

    def skip_update(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take part in an update [any shape], as other ranks need it, and leave this engine alone; from any thread."""

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        callbacks: GenerateCallbacks | None = None,
        supply: Supply | None = None,
    ) -> list[list[Rollout]]:
        """Sample every request, and what is taken of the supply; returns the rollouts of each, by index.

        Requests are numbered in the order in which they came: those given, then those taken. Raises where weights were
        never given.
        """

    def kv_usage(self) -> KvUsage | None:
        """Return the usage of the last call of generate, until sleep; None where the engine does not report it."""

    def restart(self, why: str) -> bool:
        """Restart an engine process with the weights that it has; return False, on all ranks, without a process."""

    def sleep(self) -> None:
        """Give memory back (weights and caches) until wake. Every rank that shares the engine calls it, and it returns
        when the memory of all their GPUs is free."""

    def wake(self) -> None:
        """Be ready for update_weights and generate again; weights must be sent anew. Every rank that shares the engine
        calls it, and the engine takes no memory before all of them have."""

    def barrier(self) -> None:
        """Wait for the other ranks that share this engine. It stands for sleep or wake on a rank whose engine cannot be
        asked, because those of the other ranks wait for it."""


def extend_spans(spans: Spans, version: int, tokens: int) -> Spans:
    """Return the spans of a rollout to which `version` of the weights has added `tokens`."""
    if not tokens:
        return spans
    if spans and spans[-1][0] == version:
        return (*spans[:-1], (version, spans[-1][1] + tokens))
    return (*spans, (version, tokens))


def check_context(
    requests: Sequence[Request], sampling: Sampling, supply: Supply | None, context: int, whose: str
) -> None:
    """Raise UserError where the longest prompt and response would exceed the context; whose: "model's"."""
    longest = max((len(r.prompt.token_ids) for r in requests), default=0)
    longest = max(longest, supply.prompt_tokens if supply else 0)
    if longest + sampling.max_tokens > context:
        raise UserError(
            f"rollout.max_tokens = {sampling.max_tokens} after a prompt of {longest} tokens exceeds the {whose} "
            f"context of {context}: lower rollout.max_tokens or shorten the prompts"
        )


def rollouts_to_tensors(rows: Sequence[ScoredRollout]) -> dict[str, Tensor]:
    """Any number of rows in a few tensors; files cost per object.

    heads [B, 7] int64: group, sibling, tokens, finish, spans, right, answer. token_ids [sum of tokens] int64, log_probs
    likewise float32, spans [sum of spans, 2] int64, rewards [B] float32. verdicts [bytes] uint8: as JSON, each distinct
    one once; verdict [B] int64: which of them, -1: none.
    """
    rollouts = [row.rollout for row in rows]
    heads = [
        (row.group, r.index, len(r.token_ids), _FINISH.index(r.finish), len(r.spans), row.right, row.answer)
        for row, r in zip(rows, rollouts, strict=True)
    ]
    spans = [span for r in rollouts for span in r.spans]
    # Equal answers share a verdict, object and all.
    distinct = {id(row.score): row.score for row in rows if row.score}
    place = {key: i for i, key in enumerate(distinct)}
    texts = [(v.reward, v.status, v.reason, dict(v.parts)) for v in distinct.values()]
    return {
        "heads": torch.tensor(heads, dtype=torch.int64).view(-1, 7),
        "token_ids": torch.cat([torch.zeros(0, dtype=torch.int64), *(r.token_ids for r in rollouts)]),
        "log_probs": torch.cat([torch.zeros(0), *(r.log_probs for r in rollouts)]),
        "spans": torch.tensor(spans, dtype=torch.int64).view(-1, 2),
        "rewards": torch.tensor([row.reward for row in rows], dtype=torch.float32),
        "verdicts": torch.tensor(list(json.dumps(texts).encode()), dtype=torch.uint8),
        "verdict": torch.tensor([place.get(id(row.score), -1) for row in rows], dtype=torch.int64),
    }


def rollouts_from_tensors(tensors: Mapping[str, Tensor]) -> list[ScoredRollout]:
    """Return the rollouts of rollouts_to_tensors, bit for bit. Their token_ids and log_probs [G] are views."""
    heads = tensors["heads"].tolist()
    lengths = [head[2] for head in heads]
    ids = tensors["token_ids"].split(lengths)
    log_probs = tensors["log_probs"].split(lengths)
    spans = tensors["spans"].tolist()
    texts = json.loads(bytes(tensors["verdicts"].tolist()))
    verdicts = [*(ScoreResult(*each) for each in texts), None]  # entry -1: none
    rows = []
    at = 0
    for (group, sibling, _, finish, count, right, answer), i, lp, reward, v in zip(
        heads, ids, log_probs, tensors["rewards"].tolist(), tensors["verdict"].tolist(), strict=True
    ):
        own = tuple((version, tokens) for version, tokens in spans[at : at + count])
        rollout = Rollout(sibling, i, lp, _FINISH[finish], own)
        rows.append(ScoredRollout(group, rollout, reward, bool(right), answer, verdicts[v]))
        at += count
    return rows


def sort_rollouts(rows: Sequence[ScoredRollout]) -> list[ScoredRollout]:
    """By group, then by sibling."""
    return sorted(rows, key=lambda row: (row.group, row.rollout.index))
