"""Rewards of sampled responses, computed while others are still being sampled."""

from __future__ import annotations

import functools
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
from megatron_brorl.rewards.worker_pool import RewardPool, ScoreRequest, completed
from megatron_brorl.types import Prompt, Rollout, ScoreResult, Status

_RAISED = {
    "error": "{} raised on an answer, which scores 0 (metric verifier_errors)",
    "broken": "{} is broken: it raises on a reference answer too",
    "invalid": "{} returned no valid score, so its answer scores 0",
}


@dataclass(frozen=True)
class _Pending:
    cut_off: bool  # by rollout.max_tokens
    unscored: bool  # No verifier scores it, because it was cut off.
    answer: str | None
    score: Future[ScoreResult]
    scored_by: str  # for messages


@dataclass(frozen=True)
class Scores:
    """Rewards of B rollouts, and the results of their verifiers or environments."""

    rewards: Tensor  # [B] float32
    right: list[bool]  # whether each response counts as correct
    answers: list[str | None]  # the scored part of each response; None: it has no answer, or was not scored
    results: list[ScoreResult]
    counts: dict[str, int]  # rollouts of each status of ScoreResult, and "length": those that were not scored
    raised: dict[str, str]  # message about each failing verifier -> the reason of its first failure


@dataclass(eq=False)
class Scorer:
    """Scores the rollouts of one call of the engine as they end; a context manager.

    A thread decodes the texts and finds the answers, so that the engine's thread does not wait. A rollout with an
    environment has the score of its episode, and the text of the model's last turn as answer. A verifier scores the
    text that an agent returns.
    """

    prompts: Sequence[Prompt]  # one per request to the engine; more may be added
    decode: Callable[[list[int]], str]
    stop_ids: Sequence[int]  # tokens that end a response and are not part of its text
    pool: RewardPool
    config: RewardConfig

    def __post_init__(self) -> None:
        self._entry = functools.cache(entry)
        self._pending: dict[tuple[int, int], _Pending] = {}  # by request and sibling
        self._ended: SimpleQueue[tuple[int, Rollout] | None] = SimpleQueue()  # None is the last item
        self._error: BaseException | None = None
        self._cancelled = False
        self._thread = threading.Thread(target=self._submit_rollouts, name="scoring", daemon=True)
        self._thread.start()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        self._cancelled = kind is not None
        self._ended.put(None)
        self._thread.join()
        if self._cancelled:
            self.pool.cancel()

    def finished(self, request: int, rollout: Rollout) -> None:
        """Queue a finished rollout of prompts[request] for scoring. The engine's thread calls this.

        Raises the error of an earlier rollout, so that the engine can stop.
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
        pending = [self._pending[place] for place in places]
        results = [item.score.result() for item in pending]
        pairs = list(zip(results, pending, strict=True))
        graded = [final_reward(result, item.cut_off, self.config) for result, item in pairs]

        counts = Counter(dict.fromkeys((*get_args(Status), "length"), 0))
        counts.update("length" if item.unscored else result.status for result, item in pairs)
        raised: dict[str, str] = {}
        for (request, _), (result, item) in zip(places, pairs, strict=True):
            if result.status in _RAISED:
                row = f"row {self.prompts[request].id}: " if result.status == "invalid" else ""
                raised.setdefault(_RAISED[result.status].format(item.scored_by), row + result.reason)
        return Scores(
            rewards=torch.tensor([reward for reward, _ in graded], dtype=torch.float32),
            right=[right for _, right in graded],
            answers=[item.answer for item in pending],
            results=results,
            counts=dict(counts),
            raised=raised,
        )

    def _submit_rollouts(self) -> None:
        try:
            while (ended := self._ended.get()) is not None and not self._cancelled:
                request, rollout = ended
                self._pending[request, rollout.index] = self._submit(self.prompts[request], rollout)
        except BaseException as e:
            self._error = e  # raised by `finished` and `scores`

    def _submit(self, prompt: Prompt, rollout: Rollout) -> _Pending:
        cut_off = rollout.finish == "length"
        if rollout.episode is not None and rollout.episode.score is not None:
            turns = [ids for sampled, ids in rollout.parts() if sampled]
            text = self.decode(without_stop(turns[-1], self.stop_ids).tolist())
            score = completed(rollout.episode.score)
            return _Pending(cut_off, unscored=False, answer=text.strip(), score=score, scored_by="the environment")

        verifier = self._entry(prompt.verifier, "verifier", self.config)
        unscored = cut_off and not scores_cut_off(verifier, self.config)
        extracted = Found(None, no_answer_reason="cut off")
        if not unscored:
            returned = rollout.episode.text if rollout.episode else None
            if returned is None:
                returned = self.decode(without_stop(rollout.token_ids, self.stop_ids).tolist())
            extracted = extract(returned, verifier.find, verifier.max_chars)
        submitted = self.pool.submit(ScoreRequest(prompt, *extracted))
        return _Pending(cut_off, unscored, extracted.answer, submitted, f"verifier {verifier_name(prompt)}")


def final_reward(score: ScoreResult, cut_off: bool, config: RewardConfig) -> tuple[float, bool]:
    """Return the reward of a scored response, and whether the response counts as correct.

    A response is correct if its verifier's own reward is at least reward.correct_at. Both are rounded to float32, so
    that 0.7 + 0.2 + 0.1, which is below 1 in float64, passes for 1. A response that rollout.max_tokens cut off is
    correct only if reward.cut_off_factor is 1. A response without a score is never correct.
    """
    is_correct = score.status == "ok" and bool(np.float32(score.reward) >= np.float32(config.correct_at))
    reward = float(is_correct) if config.strict else score.reward
    if not cut_off:
        return reward, is_correct
    # A factor below 1 would raise a negative reward. A cut-off response would then score better than a wrong one.
    return min(reward, config.cut_off_factor * reward), is_correct and config.cut_off_factor == 1


def scores_cut_off(verifier: Entry, config: RewardConfig) -> bool:
    """Return whether the reward of a cut-off response can differ from 0. If so, its verifier has to score it."""
    return config.cut_off_factor > 0 or (verifier.is_custom and not config.strict)


def without_stop(token_ids: Tensor, stop_ids: Sequence[int]) -> Tensor:
    """Return the tokens [G] of a response's text: without the stop token that ends it."""
    return token_ids[:-1] if len(token_ids) and int(token_ids[-1]) in stop_ids else token_ids


def verifier_name(prompt: Prompt) -> str:
    """Return the verifier of a row, with its task if the verifier has several."""
    task = prompt.metadata.get("source_dataset")
    return f"{prompt.verifier} ({task})" if task else prompt.verifier
