"""Rewards of sampled responses, computed while others are still being sampled."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from megatron_brorl.config.schema import RewardConfig
from megatron_brorl.rewards.extract import Found, extract
from megatron_brorl.rewards.registry import entry
from megatron_brorl.rewards.verifier import Entry
from megatron_brorl.rewards.worker_pool import RewardPool, ScoreRequest
from megatron_brorl.types import Prompt, Rollout, ScoreResult, Status

_RAISED = {
    "error": "verifier {} raised on an answer, which scores 0 (metric verdict_errors)",
    "broken": "verifier {} is broken: it raises on a reference answer too",
    "invalid": "verifier {} gave no score, so that its answer scores 0",
}


@dataclass(frozen=True)
class Scores:
    """Rewards and verdicts of B rollouts."""

    rewards: Tensor  # [B] float32
    right: list[bool]  # whether each counts as correct
    answers: list[str | None]  # the judged part of each response; None: it has no answer, or was not judged
    verdicts: list[ScoreResult]
    counts: dict[str, int]  # rollouts of each status of ScoreResult, and "length": those that were not judged
    raised: dict[str, str]  # per verifier that raised or gave no score: what happened, and the first reason


class Scorer:
    """Scores the rollouts of one call of the engine as they end; a context manager.

    A thread decodes the texts and finds the answers, so that the engine's thread continues at once.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        decode: Callable[[list[int]], str],
        stop_ids: Sequence[int],
        pool: RewardPool,
        config: RewardConfig,
    ) -> None:
        """prompts: one per request to the engine; more may be added. stop_ids: tokens that end a response and are not
        part of its text."""
        self._prompts, self._decode, self._stop_ids = prompts, decode, stop_ids
        self._pool, self._config = pool, config
        self._entries: dict[str, Entry] = {}
        self._judged: dict[tuple[int, int], _Judged] = {}  # by request and sibling
        self._ended: SimpleQueue[tuple[int, Rollout] | None] = SimpleQueue()  # None is the last item
        self._error: BaseException | None = None
        self._cancelled = False
        self._thread = threading.Thread(target=self._serve, name="scoring", daemon=True)
        self._thread.start()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        self._cancelled = kind is not None
        self._ended.put(None)
        self._thread.join()
        if self._cancelled:
            self._pool.cancel()

    def finished(self, request: int, rollout: Rollout) -> None:
        """Take a rollout of prompts[request] that has ended; rollout.watchdog.Finished, for the engine's thread.

        Raises the error of an earlier rollout, so that the engine need not continue.
        """
        if self._error:
            raise self._error
        self._ended.put((request, rollout))

    def scores(self, places: Sequence[tuple[int, int]]) -> Scores:
        """Wait for the scores of the rollouts (request, sibling), all of which have ended."""
        self._ended.put(None)
        self._thread.join()
        if self._error:
            raise self._error
        judged = [self._judged[place] for place in places]
        verdicts = [each.verdict.result() for each in judged]
        worths = [final_reward(v, each.cut_off, self._config) for v, each in zip(verdicts, judged, strict=True)]

        counts = Counter(dict.fromkeys((*get_args(Status), "length"), 0))
        counts.update("length" if each.unseen else v.status for v, each in zip(verdicts, judged, strict=True))
        raised: dict[str, str] = {}
        for (request, _), verdict in zip(places, verdicts, strict=True):
            if verdict.status in _RAISED:
                prompt = self._prompts[request]
                row = f"row {prompt.id}: " if verdict.status == "invalid" else ""
                raised.setdefault(_RAISED[verdict.status].format(verifier_name(prompt)), row + verdict.reason)
        return Scores(
            rewards=torch.tensor([reward for reward, _ in worths], dtype=torch.float32),
            right=[right for _, right in worths],
            answers=[each.answer for each in judged],
            verdicts=verdicts,
            counts=dict(counts),
            raised=raised,
        )

    def _serve(self) -> None:
        try:
            while (ended := self._ended.get()) is not None and not self._cancelled:
                request, rollout = ended
                self._judged[request, rollout.index] = self._judge(self._prompts[request], rollout)
        except BaseException as e:
            self._error = e  # raised by `finished` and `scores`

    def _judge(self, prompt: Prompt, rollout: Rollout) -> _Judged:
        if prompt.verifier not in self._entries:
            self._entries[prompt.verifier] = entry(prompt.verifier, "verifier", self._config)
        judged_by = self._entries[prompt.verifier]
        cut_off = rollout.finish == "length"
        unseen = cut_off and not scores_cut_off(judged_by, self._config)
        if unseen:
            found = Found(None, "cut off")
        else:
            text = self._decode(without_stop(rollout.token_ids, self._stop_ids).tolist())
            found = extract(text, judged_by.find, judged_by.max_chars)
        return _Judged(cut_off, unseen, found.answer, self._pool.submit(ScoreRequest(prompt, *found)))


@dataclass(frozen=True)
class _Judged:
    cut_off: bool  # by rollout.max_tokens
    unseen: bool  # no verifier judges it
    answer: str | None
    verdict: Future[ScoreResult]


def final_reward(verdict: ScoreResult, cut_off: bool, config: RewardConfig) -> tuple[float, bool]:
    """Return the reward of a response with this verdict, and whether the response counts as correct.

    A response is correct if its verifier's own reward is at least reward.correct_at. Both are rounded to float32, so
    that 0.7 + 0.2 + 0.1, which is below 1 in float64, passes for 1. A response that rollout.max_tokens cut off is
    correct only if reward.cut_off_factor is 1. A response without a score is never correct.
    """
    reaches = verdict.status == "ok" and bool(np.float32(verdict.reward) >= np.float32(config.correct_at))
    reward = float(reaches) if config.strict else verdict.reward
    if not cut_off:
        return reward, reaches
    # A factor below 1 would raise a negative reward, so that a cut-off response scored better than a wrong one.
    return min(reward, config.cut_off_factor * reward), reaches and config.cut_off_factor == 1


def scores_cut_off(judged_by: Entry, config: RewardConfig) -> bool:
    """Return whether the reward of a cut-off response can differ from 0, so that its verifier has to judge it."""
    return config.cut_off_factor > 0 or (judged_by.foreign and not config.strict)


def without_stop(token_ids: Tensor, stop_ids: Sequence[int]) -> Tensor:
    """Return the tokens [G] of a response's text: without the stop token that ends it."""
    return token_ids[:-1] if len(token_ids) and int(token_ids[-1]) in stop_ids else token_ids


def verifier_name(prompt: Prompt) -> str:
    """Return the verifier of a row, with its task if the verifier has several."""
    task = prompt.metadata.get("source_dataset")
    return f"{prompt.verifier} ({task})" if task else prompt.verifier
