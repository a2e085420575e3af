"""The interface of a rollout engine, and the data that callers exchange with it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, get_args

import torch
from torch import Tensor

from megatron_brorl.errors import UserError
from megatron_brorl.families.shape import ModelShape
from megatron_brorl.types import Episode, FinishReason, Prompt, Rollout, ScoredRollout, ScoreResult

# (logits [B, V], keys, index, position [B], temperature, top_p, top_k) -> ids and log-probs [B]: sample_tokens of
# ops.reference.sampling or ops.fused.decode.
SampleTokens = Callable[[Tensor, Tensor, Tensor, Tensor, float, float, int], tuple[Tensor, Tensor]]
Spans = tuple[tuple[int, int], ...]  # (version of the weights, number of tokens sampled with it), in order
_FINISH: tuple[FinishReason, ...] = get_args(FinishReason)


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. temperature = 0 is greedy decoding."""

    temperature: float
    top_p: float
    top_k: int  # 0 = off
    max_tokens: int  # per response
    stop_ids: tuple[int, ...]  # a response ends with the first of these tokens and includes it
    stop_strings: tuple[str, ...] = ()  # a response ends with the token that completes one of these
    tokens_per_call: int = 0  # a call of generate cuts a response after this many new tokens; 0 = no limit
    turn_tokens: int = 0  # for turns of an environment: one ends with "length" after this many tokens; 0 = no turns
    # Requests of agents arrive at any time. Their prompts share no keys and values, whose last bits would depend on it.
    shares_prefixes: bool = True
    log_probs: bool = True  # False: the engine may return nan
    routes: bool = False  # record the experts of every token (Rollout.routes)

    @property
    def new_tokens(self) -> int:
        """Return how many tokens a call of generate adds to a response at most."""
        return self.tokens_per_call or self.turn_tokens or self.max_tokens


@dataclass(frozen=True)
class KvUsage:
    """Usage of the KV cache in one call of generate. peak and mean are fractions of its size."""

    peak: float
    mean: float  # over decoding steps
    steps: int  # decoding steps
    prompt_tokens: int  # prompt tokens of all admitted rollouts
    cached_prompt_tokens: int  # those whose keys and values were already in the cache


@dataclass(frozen=True)
class Request:
    """n rollouts (siblings) of one prompt, with the indices first .. first + n - 1 in its random stream."""

    prompt: Prompt
    key: int  # from ops.philox.stream_key; random numbers are a function of (key, sibling, position)
    n: int
    first: int = 0
    # Siblings that were "cut" before and continue from their tokens. The Episode of an engine's rollout is that of the
    # sibling that it continues; rollout.turns extends it.
    begun: tuple[Rollout, ...] = ()
    # Limits of a single call of an agent, in addition to those of Sampling.
    max_tokens: int = 0  # 0: no further limit
    stop_strings: tuple[str, ...] = ()
    withdrawn: threading.Event | None = None  # If it is set, the engine ends the rollouts as "cut".

    def rollouts(self) -> Iterator[Rollout]:
        """Yield the initial state of every sibling: without tokens, or the "cut" rollout that it continues."""
        nothing = torch.empty(0, dtype=torch.int64), torch.empty(0)
        begun = {r.index: r for r in self.begun}
        for sibling in range(self.first, self.first + self.n):
            yield begun.get(sibling) or Rollout(sibling, *nothing, "cut")


class GenerateCallbacks(Protocol):
    """Callbacks of one call of generate. The generating thread calls them, so they must be quick and thread-safe."""

    def finished(self, request: int, rollout: Rollout) -> None:
        """Receive a finished rollout of requests[request], possibly long before generate returns."""

    def cancelled(self) -> bool:
        """Return whether generate must stop and return unfinished rollouts as "cut". Called at least once per token."""


class Supply(Protocol):
    """A queue of requests that all ranks' engines share during a call of generate.

    The generating thread calls it between two tokens.
    """

    rows: int  # maximum number of rollouts that this engine can receive
    prompt_tokens: int  # length of the longest prompt

    def next_requests(self, room: int) -> list[Request]:
        """Return requests with at most `room` rollouts in total for the caller to sample; [] if none are ready.

        The engine calls it once before the first token and then whenever it has room. The engines of other ranks sample
        the remaining requests.
        """

    def has_more(self) -> bool:
        """Return whether an engine without rollouts should call next_requests again.

        Only an engine without rollouts calls it, because it may wait a moment for the next request.
        """


class RolloutEngine(Protocol):
    """Samples rollouts from a full copy of the policy."""

    version: int  # version of the current weights; -1 before the first update

    @property
    def duplicate_advice(self) -> str:
        """Return the engine's name and the remedy if it samples several rollouts with the same random numbers."""

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights by these full tensors [any shape], named as in Hugging Face checkpoints.

        Raises weight_stream.UpdateRefused and keeps the previous weights if a tensor is missing, unknown, of the
        wrong shape or different from its checksum (ops.checksum.ChecksummedTensor), or if the stream fails.
        """

    def skip_update(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Consume the tensors [any shape], because producing them is a collective, but keep the current weights.

        May be called from any thread.
        """

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        callbacks: GenerateCallbacks | None = None,
        supply: Supply | None = None,
    ) -> list[list[Rollout]]:
        """Sample all requests and those that the supply returns. Return the rollouts of each request, by index.

        The given requests come first, then those of the supply in the order of their arrival. Raises RuntimeError if
        the engine has no weights.
        """

    def kv_usage(self) -> KvUsage | None:
        """Return the cache usage of the last generate call since sleep, or None if the engine does not report it."""

    def restart(self, why: str) -> bool:
        """Restart the engine process with its current weights. Return False, on all ranks, if there is no process."""

    def sleep(self) -> None:
        """Free the memory of weights and caches.

        Collective of the ranks that share the engine. It returns when the memory on all their GPUs is free.
        """

    def wake(self) -> None:
        """Prepare for update_weights and generate. The weights must be sent again.

        Collective of the ranks that share the engine. The engine allocates no memory before all of them have called it.
        """

    def barrier(self) -> None:
        """Wait for the other ranks that share this engine.

        A rank whose engine is stuck calls this instead of sleep or wake, because the other ranks wait for it.
        """


def extend_spans(spans: Spans, version: int, tokens: int) -> Spans:
    """Return the spans of a rollout after `version` of the weights has added `tokens` tokens."""
    if not tokens:
        return spans
    if spans and spans[-1][0] == version:
        return (*spans[:-1], (version, spans[-1][1] + tokens))
    return (*spans, (version, tokens))


def turn_start(begun: Rollout) -> int:
    """Return the number of first tokens of a continued rollout in which stop strings are not searched.

    They are its earlier turns and the observations of its environment; without an environment, there are none.
    """
    return 0 if begun.episode is None else len(begun.episode.sampled)


def check_context(
    requests: Sequence[Request], sampling: Sampling, supply: Supply | None, context: int, whose: str
) -> None:
    """Raise UserError if the longest prompt and response exceed the context. whose: "model's" or "engine's"."""
    longest = max((len(r.prompt.token_ids) for r in requests), default=0)
    longest = max(longest, supply.prompt_tokens if supply else 0)
    if longest + sampling.max_tokens > context:
        raise UserError(
            f"rollout.max_tokens = {sampling.max_tokens} after a prompt of {longest} tokens exceeds the {whose} "
            f"context of {context}: lower rollout.max_tokens or shorten the prompts"
        )


def empty_routes(shape: ModelShape) -> Tensor:
    """Return the routes [0, layers, k] of no token, in the smallest dtype that holds the number of an expert."""
    dtype = torch.uint8 if shape.experts <= 256 else torch.int16
    return torch.empty(0, shape.layers, shape.chosen_experts, dtype=dtype)


def rollouts_to_tensors(rows: Sequence[ScoredRollout]) -> dict[str, Tensor]:
    """Pack scored rollouts into a few tensors, because every object in a checkpoint file costs time.

    heads [B, 7] int64: group, sibling, number of tokens, finish, number of spans, right, answer. token_ids [tokens]
    int64 and log_probs [tokens] float32 of all rollouts. spans [spans, 2] int64. rewards [B] float32. scores [bytes]
    uint8: JSON of the distinct ScoreResults. score [B] int64: index of each rollout's ScoreResult, -1 for none.
    Only with environments: episodes [E, 5] int64: index of the rollout, turns, calls, malformed calls, and index of
    the ScoreResult; sampled [tokens] bool of these rollouts; starts [S, 2] int64: index of the rollout, and start of a
    sequence of an agent. Only with routes: routes [rows, layers, k] of all
    rollouts; route_rows [B] int64: rows of each rollout, 0 for none.
    """
    rollouts = [row.rollout for row in rows]
    heads = [
        (row.group, r.index, len(r.token_ids), _FINISH.index(r.finish), len(r.spans), row.right, row.answer)
        for row, r in zip(rows, rollouts, strict=True)
    ]
    spans = [span for r in rollouts for span in r.spans]
    episodes = [(i, r.episode) for i, r in enumerate(rollouts) if r.episode]
    routes = [r.routes for r in rollouts if r.routes is not None]
    route_rows = torch.tensor([0 if r.routes is None else len(r.routes) for r in rollouts])
    # Rollouts with equal answers share one ScoreResult object.
    given = [row.score for row in rows] + [episode.score for _, episode in episodes]
    distinct = {id(score): score for score in given if score}
    place = {key: i for i, key in enumerate(distinct)}
    texts = [(v.reward, v.status, v.reason, dict(v.parts)) for v in distinct.values()]
    of_episodes = {
        "episodes": torch.tensor([(i, e.turns, e.calls, e.malformed, place.get(id(e.score), -1)) for i, e in episodes]),
        "sampled": torch.cat([torch.zeros(0, dtype=torch.bool), *(e.sampled for _, e in episodes)]),
        "starts": torch.tensor([(i, at) for i, e in episodes for at in e.starts], dtype=torch.int64).view(-1, 2),
    }
    return {
        "heads": torch.tensor(heads, dtype=torch.int64).view(-1, 7),
        "token_ids": torch.cat([torch.zeros(0, dtype=torch.int64), *(r.token_ids for r in rollouts)]),
        "log_probs": torch.cat([torch.zeros(0), *(r.log_probs for r in rollouts)]),
        "spans": torch.tensor(spans, dtype=torch.int64).view(-1, 2),
        "rewards": torch.tensor([row.reward for row in rows], dtype=torch.float32),
        "scores": torch.tensor(list(json.dumps(texts).encode()), dtype=torch.uint8),
        "score": torch.tensor([place.get(id(row.score), -1) for row in rows], dtype=torch.int64),
        **(of_episodes if episodes else {}),
        **({"routes": torch.cat(routes), "route_rows": route_rows} if routes else {}),
    }


def rollouts_from_tensors(tensors: Mapping[str, Tensor]) -> list[ScoredRollout]:
    """Return the rollouts of rollouts_to_tensors, bit for bit. Their tensors are views."""
    heads = tensors["heads"].tolist()
    lengths = [head[2] for head in heads]
    ids = tensors["token_ids"].split(lengths)
    log_probs = tensors["log_probs"].split(lengths)
    spans = tensors["spans"].tolist()
    texts = json.loads(bytes(tensors["scores"].tolist()))
    scores = [*(ScoreResult(*each) for each in texts), None]  # index -1 selects None
    episodes = {}
    if "episodes" in tensors:
        of_episodes = tensors["episodes"].tolist()
        masks = tensors["sampled"].split([lengths[row] for row, *_ in of_episodes])
        starts: dict[int, tuple[int, ...]] = {}
        for row, start in tensors["starts"].tolist():
            starts[row] = (*starts.get(row, ()), start)
        episodes = {
            row: Episode(mask, turns, calls, malformed, scores[v], starts.get(row, ()))
            for (row, turns, calls, malformed, v), mask in zip(of_episodes, masks, strict=True)
        }
    routes = [None] * len(heads)
    if "routes" in tensors:
        split = tensors["routes"].split(tensors["route_rows"].tolist())
        routes = [own if len(own) else None for own in split]
    rows: list[ScoredRollout] = []
    at = 0
    for (group, sibling, _, finish, count, right, answer), i, lp, reward, v in zip(
        heads, ids, log_probs, tensors["rewards"].tolist(), tensors["score"].tolist(), strict=True
    ):
        own = tuple((version, tokens) for version, tokens in spans[at : at + count])
        rollout = Rollout(sibling, i, lp, _FINISH[finish], own, episodes.get(len(rows)), routes[len(rows)])
        rows.append(ScoredRollout(group, rollout, reward, bool(right), answer, scores[v]))
        at += count
    return rows


def sort_rollouts(rows: Sequence[ScoredRollout]) -> list[ScoredRollout]:
    """Return the rollouts sorted by group, then by sibling."""
    return sorted(rows, key=lambda row: (row.group, row.rollout.index))
