"""The interface of a rollout engine, and the data that callers exchange with it."""

from __future__ import annotations

import json
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_brorl.errors import UserError
from megatron_brorl.families.shape import ModelShape
from megatron_brorl.types import Episode, Prompt, Rollout, ScoredRollout, ScoreResult

# (logits [B, V], keys, index, position [B], temperature, top_p, top_k) -> ids and log-probs [B]: sample_tokens of
# ops.reference.sampling or ops.fused.decode.
SampleTokens = Callable[[Tensor, Tensor, Tensor, Tensor, float, float, int], tuple[Tensor, Tensor]]
Spans = tuple[tuple[int, int], ...]  # (version of the weights, number of tokens sampled with it), in order


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
    turn_tokens: int = 0  # for turns of an environment: a turn ends with "length" after this many tokens; 0 = no turns
    # False for agents: their requests arrive at any time, on which the last bits of shared keys would depend.
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
    # Siblings that were "cut" before and continue from their tokens. An engine keeps the Episode of a continued sibling
    # unchanged; rollout.turns extends it.
    begun: tuple[Rollout, ...] = ()
    # Limits of a single call of an agent, in addition to those of Sampling.
    max_tokens: int = 0  # 0: no further limit
    stop_strings: tuple[str, ...] = ()
    withdrawn: threading.Event | None = None  # If it is set, the engine ends the rollouts as "cut".

    def rollouts(self) -> Iterator[Rollout]:
        """Yield the initial state of every sibling: without tokens, or the "cut" rollout that it continues."""
        no_tokens = torch.empty(0, dtype=torch.int64), torch.empty(0)
        begun = {rollout.index: rollout for rollout in self.begun}
        for sibling in range(self.first, self.first + self.n):
            yield begun.get(sibling) or Rollout(sibling, *no_tokens, "cut")


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

        The engine calls it before the first token and whenever it has room. Other engines sample the other requests.
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

    These tokens are its earlier turns and the observations of its environment. Without an environment it has none.
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

    token_ids [tokens] int64 and log_probs [tokens] float32 of all rollouts. sampled [tokens] bool of those with an
    episode. routes [rows, layers, k] of those with routes, if there are any. json [bytes] uint8: the distinct
    ScoreResults, and the other fields of each rollout.
    """
    rollouts = [row.rollout for row in rows]
    episodes = [rollout.episode for rollout in rollouts if rollout.episode]
    routes = [rollout.routes for rollout in rollouts if rollout.routes is not None]
    # Rollouts with equal answers share one ScoreResult object.
    scores = {id(score): score for score in (*(row.score for row in rows), *(e.score for e in episodes)) if score}
    score_index = {key: i for i, key in enumerate(scores)}
    score_texts = [(score.reward, score.status, score.reason, dict(score.parts)) for score in scores.values()]
    records = []
    for row in rows:
        rollout, episode = row.rollout, row.rollout.episode
        episode_score = episode and score_index.get(id(episode.score), -1)
        episode_record = episode and (episode.turns, episode.calls, episode.malformed, episode_score, episode.starts)
        sizes = (len(rollout.token_ids), 0 if rollout.routes is None else len(rollout.routes))
        score_record = row.group, row.reward, row.right, row.answer, score_index.get(id(row.score), -1)
        records.append((sizes, score_record, rollout.index, rollout.finish, rollout.spans, episode_record))
    return {
        "token_ids": torch.cat([torch.zeros(0, dtype=torch.int64), *(rollout.token_ids for rollout in rollouts)]),
        "log_probs": torch.cat([torch.zeros(0), *(rollout.log_probs for rollout in rollouts)]),
        "sampled": torch.cat([torch.zeros(0, dtype=torch.bool), *(episode.sampled for episode in episodes)]),
        "json": torch.frombuffer(
            bytearray(json.dumps([score_texts, records], default=operator.index).encode()), dtype=torch.uint8
        ),
        **({"routes": torch.cat(routes)} if routes else {}),
    }


def rollouts_from_tensors(tensors: Mapping[str, Tensor]) -> list[ScoredRollout]:
    """Return the rollouts of rollouts_to_tensors, bit for bit. Their tensors are views."""
    score_texts, records = json.loads(tensors["json"].numpy().tobytes())
    scores = [*(ScoreResult(*text) for text in score_texts), None]  # index -1 selects None
    lengths = [tokens for (tokens, _), *_ in records]
    masks = iter(tensors["sampled"].split([tokens for (tokens, _), *_, episode_record in records if episode_record]))
    route_lengths = [size for (_, size), *_ in records if size]
    routes = iter(tensors["routes"].split(route_lengths) if route_lengths else ())
    rows = []
    columns = zip(records, tensors["token_ids"].split(lengths), tensors["log_probs"].split(lengths), strict=True)
    for ((_, size), score_record, index, finish, spans, episode_record), ids, log_probs in columns:
        episode = None
        if episode_record:
            turns, calls, malformed, episode_score, starts = episode_record
            episode = Episode(next(masks), turns, calls, malformed, scores[episode_score], tuple(starts))
        rollout_routes = next(routes) if size else None
        rollout = Rollout(index, ids, log_probs, finish, tuple(map(tuple, spans)), episode, rollout_routes)
        group, reward, right, answer, score_number = score_record
        rows.append(ScoredRollout(group, rollout, reward, bool(right), answer, scores[score_number]))
    return rows


def sort_rollouts(rows: Sequence[ScoredRollout]) -> list[ScoredRollout]:
    """Return the rollouts sorted by group, then by sibling."""
    return sorted(rows, key=lambda row: (row.group, row.rollout.index))
